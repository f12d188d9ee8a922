"""Warns of rollouts that are copies of each other, because their requests have the same prompt and the same seed.

A rollout depends on nothing but weights, prompt, sampling parameters and seed. Trainers that give every request the
same seed, as verl does with `full_determinism`, would train on groups of equal rollouts.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Container, Sized
from typing import Any, Protocol

logger = logging.getLogger(__name__)

SLACK = 1024
"""Ended requests that are remembered before they are looked for and forgotten."""


class LiveRequests(Container[str], Sized, Protocol):
    """The ids of a front end's live requests."""


class SeedWatch:
    """The last request of each prompt and seed.

    Args:
        live: The ids of the live requests.
    """

    def __init__(self, live: LiveRequests) -> None:
        self.seen: dict[tuple[Any, ...], str] = {}
        self._live = live

    def find_copy(self, request: Any) -> str | None:
        """The id of a live request that samples the same rollout, and remember this one. O(prompt).

        Args:
            request: vLLM's `EngineCoreRequest`. A greedy one is no copy: nothing is sampled.
        """
        params = request.sampling_params
        if params is None or params.seed is None or params.temperature == 0 or request.prompt_token_ids is None:
            return None
        adapter = request.lora_request.lora_name if request.lora_request is not None else None
        images = tuple(feature.identifier for feature in request.mm_features or ())
        sampling = params.seed, params.temperature, params.top_p, params.top_k, params.min_p
        key = hash(tuple(request.prompt_token_ids)), adapter, images, sampling
        other = self.seen.get(key)
        if len(self.seen) > 2 * len(self._live) + SLACK:
            self.seen = {key: req_id for key, req_id in self.seen.items() if req_id in self._live}
        self.seen[key] = request.request_id  # after the others were looked at: it is not live yet
        return other if other != request.request_id and other in self._live else None


def warn_of_copies(output_processor: Any) -> None:
    """Warn once when a request comes whose prompt and seed a live request has.

    Args:
        output_processor: vLLM's, which knows the live requests of a front end.
    """
    add_request = output_processor.add_request
    watch = SeedWatch(output_processor.request_states)

    @functools.wraps(add_request)
    def add_and_compare(request: Any, *args: Any, **kwargs: Any) -> Any:
        other = watch.find_copy(request)
        if other is not None:
            output_processor.add_request = add_request
            logger.warning(
                "requests %s and %s have the same prompt and the same seed, %d, so that one rollout is a copy of the "
                "other: give each rollout a seed of its own, or none. This is said once",
                other,
                request.request_id,
                request.sampling_params.seed,
            )
        return add_request(request, *args, **kwargs)

    output_processor.add_request = add_and_compare
