"""Engines with a folder of history; `tests/runners` shows that it lasts and is shared."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("vllm")

from transformers import AutoTokenizer

from rollout_spec import engine_kwargs
from rollout_spec.cli import main
from tests.history.made_up import rollouts_in
from tests.integrations.engines import build, generate, history_of, mixed_params, session_of, verify_all

pytestmark = pytest.mark.engine


def test_imported_text_is_found_by_its_prompt(tiny_model, tmp_path, capfd):
    lines = [{"prompt": "w1 w2 w3", "completion": " ".join(["w4 w5 w6 w7"] * 8), "step": 3}] * 2
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    folder = str(tmp_path / "history")
    arguments = ["--into", folder, "--tokenizer", str(tiny_model)]
    assert main(["history", "import", str(tmp_path / "rows.jsonl"), *arguments]) == 0
    assert "2 rollouts of 1 problems, 64 tokens" in capfd.readouterr().out
    llm = build(tiny_model, **verify_all(num_speculative_tokens=4, history_dir=folder))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = [tokenizer.encode(text) for text in ("w1 w2 w3", "w1 w2 w4", "w1 w2 w3")]
    generate(llm, mixed_params(3, 1), prompts)
    assert history_of(llm)["requests_with_history"] == 2
    session_of(llm).engine_history.close()
    assert len({rollout.problem_id for rollout in rollouts_in(folder)}) == 2


def test_a_folder_that_cannot_be_used_costs_a_warning_and_not_the_run(tiny_model, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    llm = build(tiny_model, **engine_kwargs(history_dir=str(tmp_path / "file")))
    params = mixed_params(3)
    assert len(generate(llm, params)) == 3
    session_of(llm).engine_history.close()
    said = [record.levelname for record in caplog.records if "cannot be used" in record.message]
    assert said == ["WARNING"], "reading and writing fail for the same reason"
    assert history_of(llm)["folder"]["rollouts_lost"] == 3
    assert history_of(llm)["rollouts"] == 3
    assert np.isfinite(history_of(llm)["folder"]["seconds"])


def test_a_drafter_that_raises_in_the_end_keeps_nothing_from_being_written(tiny_model, tmp_path, monkeypatch):
    llm = build(tiny_model, **engine_kwargs(history_dir=str(tmp_path / "history")))
    generate(llm, mixed_params(3))
    session = session_of(llm)
    monkeypatch.setattr(session.drafter.rollouts, "take_recorded", lambda **options: 1 / 0)
    session.close()
    assert len(rollouts_in(tmp_path / "history")) == 3
    assert not session.is_drafter_alive
