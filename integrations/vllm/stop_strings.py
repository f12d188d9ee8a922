"""Stop strings: output and history end with the token that completes one, as they do without speculation.

vLLM looks for stop strings in the front end, in the text of all tokens that a step sampled. A step with accepted drafts
samples several, and some may lie past the stop string. `end_outputs_at_stop_strings` cuts them off before the front end
counts them; `StopStringSearch` tells the worker where the front end will stop, so that nothing past it is indexed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine import FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from rollout_spec.integrations.vllm.compat import cuts_at_stop_strings


class StopStringSearch:
    """Looks for a request's stop strings as vLLM's front end does: with its detokenizer, one token after the other.

    Args:
        model_config: vLLM's `ModelConfig`. With `skip_tokenizer_init` no stop string is found.
        request: Any object with `prompt_token_ids` and `sampling_params`.
    """

    def __init__(self, model_config: Any, request: Any) -> None:
        self._detokenizer = IncrementalDetokenizer.from_new_request(
            cached_tokenizer_from_config(model_config),
            SimpleNamespace(
                request_id="",
                prompt_token_ids=list(request.prompt_token_ids),
                prompt_embeds=None,
                sampling_params=request.sampling_params,
            ),
        )

    def find(self, token_ids: Sequence[int], *, ends_with_stop_token: bool) -> int | None:
        """How many of the next output tokens the request keeps, up to the one that completes a stop string.

        Args:
            token_ids: Output tokens that follow those of earlier calls.
            ends_with_stop_token: Whether the last one is a stop token, which is not part of the text.

        Returns:
            The number of tokens; None if no stop string is completed. O(len(token_ids)).
        """
        return _update_until_stop(self._detokenizer, token_ids, ends_with_stop_token)[1]


def end_outputs_at_stop_strings(output_processor: Any) -> None:
    """Wrap a vLLM `OutputProcessor` so that it gets each request's output only up to the end of a stop string."""
    if cuts_at_stop_strings(output_processor):
        return
    process_outputs = output_processor.process_outputs

    @functools.wraps(process_outputs)
    def process_cut_outputs(engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            if len(output.new_token_ids) > 1:
                state = output_processor.request_states.get(output.request_id)  # None: aborted meanwhile
                if state is None or state.streaming_input:  # a streaming session continues after a stop string
                    continue
                if getattr(state.detokenizer, "stop", None):
                    end_at_stop_string(state.detokenizer, output)
        return process_outputs(engine_core_outputs, *args, **kwargs)

    output_processor.process_outputs = process_cut_outputs


def end_at_stop_string(detokenizer: Any, output: Any) -> None:
    """Cut one request's output of one step after the token that completes a stop string.

    Updates the detokenizer, and makes its next `update` return what was found: vLLM must call it next for this output.

    Args:
        detokenizer: vLLM's `IncrementalDetokenizer` of the request.
        output: vLLM's `EngineCoreOutput`; its tokens, log-probabilities and routed experts are cut.
    """
    stop_terminated = output.finish_reason == FinishReason.STOP
    stop_string, num_kept = _update_until_stop(detokenizer, output.new_token_ids, stop_terminated)

    def update(new_token_ids: list[int], stop_terminated: bool) -> str | None:
        del detokenizer.update  # uncovers the method
        return stop_string

    detokenizer.update = update
    if num_kept is None or num_kept == len(output.new_token_ids):
        return
    num_cut = len(output.new_token_ids) - num_kept
    output.new_token_ids = output.new_token_ids[:num_kept]
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(0, num_kept)
    if output.routed_experts is not None:
        output.routed_experts = output.routed_experts[:-num_cut]


def _update_until_stop(
    detokenizer: Any, token_ids: Sequence[int], ends_with_stop_token: bool
) -> tuple[str | None, int | None]:
    """(stop string, number of tokens up to the one that completes it); (None, None) if there is none."""
    for count, token in enumerate(token_ids, 1):
        stop_string = detokenizer.update([token], ends_with_stop_token and count == len(token_ids))
        if stop_string is not None:
            return stop_string, count
    return None, None
