"""A vLLM server that a trainer generates on: does it speculate, and how well, by its own counters (`/metrics`)."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter

import requests

from rollout_spec.integrations.trainers.controller import RATES, as_metrics
from rollout_spec.stats import SpeculationStats

logger = logging.getLogger(__name__)

COUNTER = re.compile(r"^vllm:(generation_tokens|spec_decode_num_\w+)_total(?:\{.*\})? (\S+)$", re.MULTILINE)


class ServerCounters:
    """vLLM's counters of generated, drafted and accepted tokens, summed over the server's engines.

    Raises RuntimeError if it does not speculate, or has no counters; OSError if it is silent for `timeout` seconds.
    """

    def __init__(self, base_url: str, timeout: float) -> None:
        self._url = base_url.rstrip("/") + "/metrics"
        self._is_silent = False  # which the log has said
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._seen = self._read()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)
        if "spec_decode_num_drafts" not in self._seen:
            raise RuntimeError(
                f"the vLLM server at {self._url} does not speculate, or runs with --disable-log-stats: it counts no "
                "vllm:spec_decode_num_drafts. Start it by: ROLLOUT_SPEC='{}' vllm serve MODEL ..."
            )

    def _read(self) -> Counter[str]:
        response = requests.get(self._url, timeout=30)
        counters: Counter[str] = Counter()
        for name, value in COUNTER.findall(response.text):
            counters[name] += int(float(value))
        return counters

    def take_metrics(self) -> dict[str, float]:
        """`rollout_spec/*` metrics since the last call; empty when nothing was generated, or none can be had."""
        try:
            now = self._read()
        except OSError as error:  # busy or gone: that is for the trainer's requests to tell
            if not self._is_silent:
                logger.warning("the vLLM server does not answer, so some logs have no rollout_spec metrics: %s", error)
            self._is_silent = True
            return {}
        if not now.keys() >= self._seen.keys():  # it has started anew, without speculation
            return {}
        new = {name: now[name] - self._seen[name] for name in self._seen}
        self._seen = now
        tokens, accepted = new["generation_tokens"], new["spec_decode_num_accepted_tokens"]
        if tokens <= 0:  # nothing was generated, or the server has started anew
            return {}
        stats = SpeculationStats(
            request_steps=tokens - accepted,  # each emits one token beside the accepted ones
            num_drafts=new["spec_decode_num_drafts"],
            draft_tokens=new["spec_decode_num_draft_tokens"],
            accepted_tokens=accepted,
            emitted_tokens=tokens,
        )
        return as_metrics(stats, RATES, {"tokens": tokens})
