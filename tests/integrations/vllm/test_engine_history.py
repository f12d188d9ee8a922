"""Engines whose history lasts and is shared, through a folder."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from transformers import AutoTokenizer

from rollout_spec import engine_kwargs
from rollout_spec.cli import main
from tests.conftest import environment_for_a_process
from tests.history import made_up
from tests.integrations.engines import (
    assert_same,
    build,
    generate,
    mixed_params,
    own_processes,
    prompts_of,
    session_of,
    stats_of,
    verify_all,
)
from tests.integrations.trainers import Compared, make_trainer

pytestmark = pytest.mark.engine


def history(llm):
    return llm.collective_rpc("rollout_spec", args=("history",))[0]


def rollouts_in(folder):
    return sorted(made_up.rollouts_in(folder), key=lambda r: (r.version, r.problem_id, r.tokens.tolist()))


def accepted(llm, params):
    """(tokens, accepted draft tokens) of a generation."""
    before = stats_of(llm)
    outputs = generate(llm, params)
    return outputs, stats_of(llm)["accepted_tokens"] - before["accepted_tokens"]


def test_a_run_that_resumes_goes_on_where_the_last_one_was(tiny_model, tmp_path):
    """The same drafts with the folder's history as with the history that the engine itself has made."""
    options = verify_all(num_speculative_tokens=4, history_dir=str(tmp_path / "history"))
    params, again = mixed_params(12, 1, temperature=1.0, max_tokens=40), mixed_params(90, 2, temperature=1.0)
    first = build(tiny_model, **options)
    said = generate(first, params)
    first.collective_rpc("rollout_spec", args=("begin_policy_version", 1))
    more = generate(first, mixed_params(12, 3))
    session_of(first).engine_history.close()
    kept = rollouts_in(tmp_path / "history")
    texts = [list(output.token_ids) for output in (*said, *more)]
    assert sorted(r.tokens.tolist() for r in kept) == sorted(texts), "the last generation's, too"
    assert {r.version for r in kept} == {0, 1}
    assert all(r.features is not None and r.features.any() for r in kept if r.tokens.size > 1)
    assert {tuple(r.context.tolist()) for r in kept} == {tuple(prompt) for prompt in prompts_of(params)}

    second = build(tiny_model, **options)
    assert stats_of(second)["policy_version"] == 1
    summary = history(second)
    assert (summary["rollouts"], summary["problems"], summary["newest_version"]) == (24, 3, 1)
    assert summary["tokens"] == sum(map(len, texts))
    assert summary["folder"]["rollouts_read"] == 24
    of_first, of_second = accepted(first, again), accepted(second, again)
    assert of_first[1] == pytest.approx(of_second[1], rel=0.02)
    assert_same(of_first[0], of_second[0], prompts_of(again), again, None)
    without = build(tiny_model, **verify_all(num_speculative_tokens=4))
    assert of_second[1] > accepted(without, again)[1]
    assert history(second)["requests_with_history"] == history(second)["requests"] == 90


def test_engines_of_a_node_draft_from_each_others_rollouts(tiny_model, tmp_path):
    options = verify_all(num_speculative_tokens=4, history_dir=str(tmp_path))
    one, other, alone = (build(tiny_model, **settings) for settings in (options, options, verify_all()))
    params = mixed_params(6, 1, max_tokens=40)
    said = generate(one, params)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and history(one)["folder"]["rollouts_written"] < len(said):
        time.sleep(0.05)
    assert history(other)["folder"]["rollouts_read"] == 0, "it was not asked for these problems"
    others = []
    while time.monotonic() < deadline and history(other)["folder"]["rollouts_read"] < len(said):
        others += generate(other, mixed_params(3, 50 + len(others), max_tokens=5))
    session_of(other).exchange_history()
    assert history(other)["rollouts"] == len(said) + len(others)
    assert session_of(other).drafter._version == 0
    same_again = accepted(other, params)
    assert_same(same_again[0], generate(alone, params), prompts_of(params), params, None)
    assert same_again[1] > accepted(alone, params)[1] / 2  # which has said it before
    for llm in (one, other):
        session_of(llm).engine_history.close()
    # What both engines have said may be the same file.
    assert {tuple(r.tokens.tolist()) for r in rollouts_in(tmp_path)} == {tuple(o.token_ids) for o in [*said, *others]}


def test_imported_text_is_found_by_its_prompt(tiny_model, tmp_path, capsys):
    lines = [{"prompt": "w1 w2 w3", "completion": " ".join(["w4 w5 w6 w7"] * 8), "step": 3}] * 2
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    folder = str(tmp_path / "history")
    arguments = ["--into", folder, "--tokenizer", str(tiny_model)]
    assert main(["history", "import", str(tmp_path / "rows.jsonl"), *arguments]) == 0
    assert "2 rollouts of 1 problems, 64 tokens" in capsys.readouterr().out
    llm = build(tiny_model, **verify_all(num_speculative_tokens=4, history_dir=folder))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = [tokenizer.encode(text) for text in ("w1 w2 w3", "w1 w2 w4", "w1 w2 w3")]
    generate(llm, mixed_params(3, 1), prompts)
    assert history(llm)["requests_with_history"] == 2
    assert stats_of(llm)["policy_version"] == 3
    session_of(llm).engine_history.close()
    assert len({rollout.problem_id for rollout in rollouts_in(folder)}) == 2


def test_closing_waits_for_what_is_still_being_copied(tiny_model, tmp_path, monkeypatch):
    llm = build(tiny_model, **engine_kwargs(history_dir=str(tmp_path / "history")))
    drafter, waited = session_of(llm).drafter, []
    take_recorded = drafter.take_recorded
    monkeypatch.setattr(drafter, "take_recorded", lambda *, wait=False: waited.append(wait) or take_recorded(wait=wait))
    session_of(llm).engine_history.close()
    assert waited == [True]


def test_a_folder_that_cannot_be_used_costs_a_warning_and_not_the_run(tiny_model, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    llm = build(tiny_model, **engine_kwargs(history_dir=str(tmp_path / "file")))
    params = mixed_params(3)
    assert len(generate(llm, params)) == 3
    session_of(llm).engine_history.close()
    said = [record.levelname for record in caplog.records if "cannot be used" in record.message]
    assert said == ["WARNING"], "reading and writing fail for the same reason"
    assert history(llm)["folder"]["rollouts_lost"] == 3
    assert history(llm)["rollouts"] == 3
    assert np.isfinite(history(llm)["folder"]["seconds"])


def test_a_drafter_that_raises_in_the_end_keeps_nothing_from_being_written(tiny_model, tmp_path, monkeypatch):
    llm = build(tiny_model, **engine_kwargs(history_dir=str(tmp_path / "history")))
    generate(llm, mixed_params(3))
    session = session_of(llm)
    monkeypatch.setattr(session.drafter, "take_recorded", lambda **options: 1 / 0)
    session.close()
    assert len(rollouts_in(tmp_path / "history")) == 3
    assert session.broken


def test_a_resumed_trainer_drafts_from_what_was_sampled_before(tiny_model, tmp_path):
    first = Compared(history_dir=True)
    make_trainer(tiny_model, tmp_path, [first], max_steps=2).train()
    session_of(first.llm).engine_history.close()
    kept = rollouts_in(tmp_path / "rollout_spec_history")
    # Everything is generated twice, the second time without drafting, which leaves no history.
    texts = [rollout.tokens.tolist() for rollout in kept]
    assert sorted(texts) == sorted(first.rollouts)
    resumed = Compared(history_dir=True)
    make_trainer(tiny_model, tmp_path, [resumed], max_steps=1)
    assert history(resumed.llm)["rollouts"] == len(texts) == 16
    assert stats_of(resumed.llm)["policy_version"] >= 1


SCRIPT = """
import sys
from vllm import LLM, SamplingParams
from rollout_spec import engine_kwargs
if __name__ == "__main__":
    llm = LLM(sys.argv[1], enforce_eager=True, dtype="float32", max_model_len=64, max_num_seqs=4,
              num_gpu_blocks_override=50, **engine_kwargs(history_dir=sys.argv[2]))
    llm.generate([{"prompt_token_ids": [1, 4, 9]}] * 4, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.exhaustive
@own_processes
def test_a_script_that_ends_leaves_all_that_it_has_said(tiny_model, tmp_path):
    """Its engine's process is forked, as is vLLM's default, and ends without exit handlers."""
    (tmp_path / "script.py").write_text(SCRIPT)
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    folder = str(tmp_path / "history")
    command = [sys.executable, str(tmp_path / "script.py"), str(tiny_model), folder]
    environment = environment_for_a_process(**variables, PYTHONPATH=str(Path(__file__).parents[3]))
    subprocess.run(command, env=environment, check=True, timeout=300)
    assert [rollout.tokens.size for rollout in rollouts_in(folder)] == [8] * 4
