"""Stop strings: output ends with the token that completes one, as it does without speculation.

vLLM looks for stop strings in the front end, in the text of all tokens that a step sampled. A step with accepted drafts
samples several, and some may lie past the stop string: they are cut off before the front end counts them.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.engine import FinishReason

from rollout_spec.integrations.vllm.compat import cuts_at_stop_strings


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
    stop_terminated, num_tokens = output.finish_reason == FinishReason.STOP, len(output.new_token_ids)
    stop_string, num_kept = None, num_tokens
    for count, token in enumerate(output.new_token_ids, 1):
        stop_string = detokenizer.update([token], stop_terminated and count == num_tokens)
        if stop_string is not None:
            num_kept = count
            break

    def update(new_token_ids: list[int], stop_terminated: bool) -> str | None:
        del detokenizer.update  # uncovers the method
        return stop_string

    detokenizer.update = update
    if num_kept == num_tokens:
        return
    output.new_token_ids = output.new_token_ids[:num_kept]
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(0, num_kept)
    if output.routed_experts is not None:
        output.routed_experts = output.routed_experts[: num_kept - num_tokens]
