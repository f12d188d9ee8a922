"""`rollout-spec estimate`: what it reads, what it refuses, what phases it simulates and what it says."""

import json
import math

import numpy as np
import pytest

from rollout_spec.budget import Budget
from rollout_spec.cli import main
from rollout_spec.drafters import build_drafter
from rollout_spec.estimate.command import _phases, simulate_run, verdict, without_drafts
from rollout_spec.estimate.costs import (
    SHAPES,
    UNIT_COST,
    EngineCost,
    MeasuredCost,
    read_step_times,
    shape_of,
    step_cost,
)
from rollout_spec.estimate.phases import (
    Engine,
    RecordedRollout,
    RecordedTarget,
    add_rollout,
    by_problem,
    read_rollouts,
    simulate,
)
from rollout_spec.features import FEATURE_WORDS
from rollout_spec.history.folder import HistoryFolder, Origin
from rollout_spec.history.logs import read
from rollout_spec.num_passes import NumPasses
from rollout_spec.schedule import Schedule
from rollout_spec.types import PLACEHOLDER_TOKEN_ID

pytest.importorskip("pyarrow")

PROMPT = np.array([1, 2], np.int32)
STEEP = EngineCost(np.array([1.0, 2.0]), np.array([1.0, 2.0]))
NO_TIMES = "nan", "0.0", "-1.0", "inf"
QWEN_7B = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_30B_A3B = {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
STEP_TIMES = """model,requests,context,num_speculative_tokens,median_ms
a,1,256,0,10.0
a,8,256,0,12.0
a,1,256,4,11.0
a,8,256,4,20.0
a,1,4096,0,15.0
a,1,4096,4,16.0
"""


def test_nothing_is_known_after_a_difference():
    """A drafter that learns from what a target says of rejected drafts would be told too much."""
    target = RecordedTarget()
    request = target.request(RecordedRollout(1, np.array([9], np.int32), np.array([5, 6, 7, 8], np.int32)))
    assert target([request], [[5, 1, 7]]).token_ids.tolist() == [5, 6, PLACEHOLDER_TOKEN_ID, PLACEHOLDER_TOKEN_ID]


def test_what_a_user_has_is_read(tmp_path, capsys):
    lines = [{"prompt_ids": [1, 2] * 40, "completion_ids": [3, 4 + k], "step": k // 2} for k in range(4)]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"prompt_ids": [1]}]))
    rollouts = read_rollouts([str(tmp_path / "ids.jsonl")])
    assert "1 left out" in capsys.readouterr().err
    assert [r.policy_version for r in rollouts] == [0, 0, 1, 1]
    assert all(r.prompt_token_ids.tolist() == [1, 2] * 40 and r.token_ids.tolist()[:1] == [3] for r in rollouts)
    folder = HistoryFolder(str(tmp_path / "history"), Origin())
    logged = [rollout for rollout, _ in read(tmp_path / "ids.jsonl", None, lambda number, reason: None)]
    folder.write([rollout._replace(features=np.ones((2, FEATURE_WORDS), np.int64)) for rollout in logged[:2]])
    folder.write(logged[2:])
    kept = read_rollouts([str(tmp_path / "history")])
    assert [(r.problem_id, r.policy_version) for r in kept] == [(r.problem_id, r.policy_version) for r in rollouts]
    assert [r.features is not None for r in kept] == [True, True, False, False]
    assert [r.mean_context for r in kept] == [r.mean_context for r in rollouts]  # a folder keeps the prompts' ends
    assert len(by_problem([*rollouts, *kept])) == 1


def write_log(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def a_log(path, steps=4, prompts=10, group=2):
    """The samples of a prompt are alike, and each prompt comes again in every second step."""
    rng, rows = np.random.default_rng(0), []
    texts = rng.integers(0, 200, (2, prompts, 60))
    for step in range(steps):
        for number in range(prompts):
            for _ in range(group):
                said = np.where(rng.random(60) < 0.1, rng.integers(0, 200, 60), texts[step % 2, number])
                rows.append({"prompt_ids": [step % 2, number], "completion_ids": said.tolist(), "step": step})
    return write_log(path, rows)


def test_a_run_is_decoded_step_by_step_and_its_later_epochs_are_told_apart(tmp_path, capsys):
    log, out = a_log(tmp_path / "log.jsonl"), tmp_path / "x.json"
    assert main(["estimate", log, "--gpu", "h100", "--model", "7b", "--requests", "20", "16", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [f"{row['requests']} {row['epoch']}" for row in rows] == ["20 first", "20 later", "16 first", "16 later"]
    for first, later in (rows[:2], rows[2:]):
        assert later["tokens_per_step"] > 1.5 * first["tokens_per_step"]
        for row in (first, later):
            assert row["interval"][0] <= row["speedup"] <= row["interval"][1]
        assert later["interval"][0] > first["interval"][1]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "80 rollouts of 20 prompts, 4 policy versions; 32 tokens of context on average"
    said = "16 requests in V2 of vLLM 0.31 or newer, drafts on the device: worth it from the second epoch on, by {}."
    assert shown[-1] == said.format(log)
    assert main(["estimate", log]) == 0
    assert "times as fast" not in capsys.readouterr().out


def test_copies_in_later_logs_are_no_later_epochs(tmp_path, capsys):
    """Each generation stands in the next two steps' files, too, of which the last one is named first."""
    words = np.random.default_rng(0).integers(0, 30_000, (48, 120)).tolist()
    rows = [{"prompt_ids": [n // 4], "completion_ids": said, "step": 3 * (n // 16)} for n, said in enumerate(words)]
    logged = [{**row, "step": row["step"] + later} for later in (2, 1, 0) for row in rows]
    rollouts = read_rollouts([write_log(tmp_path / f"{n}.jsonl", [row]) for n, row in enumerate(logged)])
    found = [(rollout.policy_version, rollout.token_ids.tolist()) for rollout in rollouts]
    assert sorted(found) == sorted((row["step"], row["completion_ids"]) for row in rows)
    assert "96 copies of rollouts are left out" in capsys.readouterr().err


def test_of_a_single_version_half_of_the_samples_is_an_earlier_epoch(tmp_path):
    rollouts = read_rollouts([a_log(tmp_path / "log.jsonl", steps=1, prompts=20, group=4)])
    assert [len(phase) for phase in _phases(by_problem(rollouts), 8)] == [32, 32, 16]
    first, later = simulate_run(rollouts, UNIT_COST, Engine(UNIT_COST, 8), 8)
    assert (first["epoch"], later["epoch"]) == ("first", "later")
    assert later["tokens_per_step"] > 1.2 * first["tokens_per_step"]
    alone = [rollout._replace(problem_id=number) for number, rollout in enumerate(rollouts)]
    (row,) = simulate_run(alone, UNIT_COST, Engine(UNIT_COST, 8), 8)
    assert row["epoch"] == "first", "there is no other sample of a prompt"


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_phases_without_drafts_are_those_of_the_simulation(batch):
    """Which takes longer to decode them; and the rollouts' shares of the steps add up to all of them."""
    rng = np.random.default_rng(0)
    lengths = [1, 40, 2, *rng.integers(1, 50, 20).tolist()]
    rollouts = [RecordedRollout(n % 3, PROMPT, np.arange(size, dtype=np.int32)) for n, size in enumerate(lengths)]
    engine = Engine(step_cost(SHAPES["7b"], "h100", None), 4, [(1, 1, 0)])
    steps = list(simulate(rollouts, build_drafter("history", max_draft_tokens=4), engine, batch=batch))
    _, live = without_drafts(np.array(lengths) - 1, batch)
    assert live.tolist() == [step.num_requests for step in steps]
    took = [seconds for step in steps for _, seconds in step.ended]
    assert len(took) == sum(size > 1 for size in lengths)
    assert sum(took) == pytest.approx(sum(step.seconds for step in steps))


def test_what_it_says():
    def row(epoch, low, prompts=20):
        return {"epoch": epoch, "interval": low and [low, 3.0], "prompts": prompts}

    assert verdict([row("first", 1.2), row("later", 1.0)]) == "worth it"
    assert verdict([row("first", 1.05), row("later", 1.2)]) == "worth it from the second epoch on"
    assert verdict([row("first", 1.05)]) == verdict([row("later", 0.9)]) == "not worth it"
    assert verdict([row("first", None, 3)]) == "3 prompts are too few for an interval and a verdict, which take 10"


def test_a_prompt_counts_once_and_one_without_steps_not_at_all():
    rollouts = [
        RecordedRollout(n, PROMPT, np.arange(2 if n < 10 else 1, dtype=np.int32), version)
        for version in (0, 1)
        for n in range(12)
    ]
    first, later = simulate_run(rollouts, UNIT_COST, Engine(UNIT_COST, 8), 4)
    assert (first["epoch"], later["epoch"], first["prompts"]) == ("first", "later", 10)
    assert (first["speedup"], first["interval"]) == (1, [1, 1])
    (row,) = simulate_run(rollouts[:9], UNIT_COST, Engine(UNIT_COST, 8), 4)
    assert (row["prompts"], row["interval"]) == (9, None)


def test_versions_are_decoded_in_their_order_not_in_that_of_the_files():
    """The long rollout of step 10 repeats the one of step 2."""
    text = np.random.default_rng(0).integers(0, 999, 40).astype(np.int32)
    rollouts = [RecordedRollout(0, PROMPT, text[: 4 * step], step) for step in (10, 2)]
    first, later = simulate_run(rollouts, UNIT_COST, Engine(UNIT_COST, 8), 4)
    assert (first["tail"], later["tokens_per_step"] > first["tokens_per_step"]) == (0, True)


@pytest.mark.parametrize(
    ("step_seconds", "num_drafted"),
    [(0.5, 16), (0.0, 0)],
    ids=["a phase's first drafts are kept", "where only tokens take time, none is"],
)
def test_each_phase_begins_alike(step_seconds, num_drafted):
    """Its requests have the same numbers as those of the last one, and their drafts count as certain."""
    texts = np.random.default_rng(0).integers(0, 3, (4, 40), np.int32)
    rollouts = [RecordedRollout(0, PROMPT, text) for text in texts]
    known = EngineCost(np.array([1.0, 2.0]), np.array([1.0, 2.0]) + step_seconds)
    for _ in range(2):
        drafter = build_drafter("history", max_draft_tokens=4)
        for rollout in rollouts:
            add_rollout(drafter, rollout)
        steps = list(simulate(rollouts, drafter, Engine(UNIT_COST, 4, known=known), batch=4))
        assert steps[0].num_draft_tokens == num_drafted


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], [], "no rollouts"),
        ([{"prompt": "a", "completion": "b"}], [], "text needs --tokenizer"),
        ([{"prompt_ids": [1], "completion_ids": [2]}], [], "nothing to draft"),  # the first comes with the prompt
        (None, ["-k", "0"], "-k must be from 1 to"),
        (None, ["--vllm", "0.23"], "--vllm must be a release from 0.24 on"),
        (None, ["--vllm", "newest"], "--vllm must be a release from 0.24 on"),
        (None, ["nowhere.jsonl"], "nowhere.jsonl"),
        (None, ["--gpu", "h100"], "--gpu needs --model: one of 0.5b, 1.5b"),
        (None, ["--gpu", "h100", "--model", "nowhere/config.json"], "--model must be one of"),
        (None, ["--step-times", "times.csv"], "--step-times needs --gpu"),
        (None, ["--step-times", "times.csv", "--gpu", "h100", "--drafter", "host"], "not for --drafter host"),
        (None, ["--step-times", "times.csv", "--gpu", "h100", "-k", "5"], "of at most 4 draft tokens: give -k 4"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch, rows, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))  # which nobody has named
    (tmp_path / "times.csv").write_text(STEP_TIMES)
    rows = [{"prompt_ids": [1], "completion_ids": [2, 3]}] if rows is None else rows
    assert main(["estimate", write_log(tmp_path / "log.jsonl", rows), *options]) == 2
    shown = capsys.readouterr()
    assert (shown.out, len(shown.err.splitlines())) == ("", 1)
    assert message in shown.err


def test_files_without_rollouts_and_copies_are_left_out(tmp_path, capsys):
    good = write_log(tmp_path / "good.jsonl", [{"prompt_ids": [1], "completion_ids": [2, 3, 4]}] * 2)
    bad = write_log(tmp_path / "bad.jsonl", [{"prompt_ids": [1], "completion_ids": []}])
    assert main(["estimate", bad, good, good]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("2 rollouts of 1 prompts")
    assert f"1 left out, first {bad}:1: the completion is empty" in shown.err
    assert "2 copies of rollouts are left out" in shown.err


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        (["--gpu", "a100"], "V2 of vLLM 0.31 or newer, drafts on the device"),
        (["--gpu", "h100", "--vllm", "0.26.1"], "V2 of vLLM 0.24 to 0.30, drafts on the device"),
        (["--gpu", "h200", "--drafter", "host"], "vLLM, drafts on the host"),
    ],
)
def test_one_rollout_is_enough_for_each_engine(tmp_path, capsys, options, engine):
    path = write_log(tmp_path / "log.jsonl", [{"prompt_ids": [1], "completion_ids": [2, 3] * 9}])
    assert main(["estimate", path, "--model", "8B", *options]) == 0
    shown = capsys.readouterr().out
    assert "1 rollouts of 1 prompts" in shown
    assert f"64 requests in {engine}: 1 prompts are too few" in shown


def test_sizes_of_a_model_follow_from_its_configuration(tmp_path):
    for name, config in (("7b", QWEN_7B), ("30b-a3b", {"text_config": QWEN_30B_A3B})):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found, known = shape_of(str(tmp_path)), SHAPES[name]
        assert found.parameters == pytest.approx(known.parameters, rel=0.01)
        assert found.of_experts == pytest.approx(known.of_experts, rel=0.01)
        assert found[1:3] == known[1:3]
        assert found.used_experts == known.used_experts
    # Three of 48 layers without experts, and in the others one that every token uses.
    dense = {"first_k_dense_replace": 3, "n_shared_experts": 1}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_30B_A3B, **dense}))
    one, found = 3 * 2048 * 768, shape_of(str(tmp_path))
    assert found.of_experts == 45 * 128 * one
    assert found.parameters - found.of_experts == pytest.approx(
        30.5e9 - 29.0e9 + 45 * one + 3 * 3 * 2048 * 6144, rel=0.02
    )
    for config, message in (
        ({**QWEN_7B, "layer_types": ["linear_attention", "full_attention"]}, "give --step-times"),
        ({"hidden_size": 8}, "no config.json of a transformer"),
        ({**QWEN_7B, "vocab_size": math.inf}, "vocab_size must be an int, got inf"),
        ({**QWEN_30B_A3B, "num_experts_per_tok": 129}, "num_experts_per_tok must be from 1 to 128, got 129"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            shape_of(str(tmp_path / "config.json"))


def test_measured_times_are_interpolated(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text(STEP_TIMES)
    cost = MeasuredCost(read_step_times(path, None, context=300))
    assert cost.by_tokens.steps([1, 5, 8, 40]).tolist() == [0.010, 0.011, 0.012, 0.020]
    assert cost.by_tokens.steps(80) > 0.025, "further draft tokens are not free"
    steps = [(1, 0), (8, 0), (8, 32), (1, 2), (16, 0)]
    assert [cost.whole_step(*step) for step in steps] == pytest.approx([0.010, 0.012, 0.020, 0.0105, 0.024])
    assert read_step_times(path, "a", context=4000) == {0: {1: 15.0}, 4: {1: 16.0}}
    path.write_text(STEP_TIMES + "b,1,301,0,9.0\n")
    assert read_step_times(path, "a", 300) == read_step_times(path, "a", 256), "b was measured with other contexts"
    path.write_text("\ufeff" + STEP_TIMES)
    assert read_step_times(path, "a", context=4000) == {0: {1: 15.0}, 4: {1: 16.0}}, "with a byte order mark"
    for text, message in (
        *(
            (STEP_TIMES.replace("12.0", ms), f"row 2 is wrong: median_ms must be positive and finite, got {ms}")
            for ms in NO_TIMES
        ),
        (STEP_TIMES + "b,1,256,0,9.0\n", "step times of a, b: name one"),
        ("\n".join(line for line in STEP_TIMES.splitlines() if ",4," not in line), "and with some"),
        (STEP_TIMES.replace("median_ms", "ms"), "row 1 has no column 'median_ms'"),
        (STEP_TIMES.splitlines()[0], "no model"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_step_times(path, None, 300)


# -- phases ------------------------------------------------------------------------------------------------------------


def phase_rollouts(num_problems=3, samples=6, tokens=120, seed=0):
    """Rollouts of a problem that are mostly alike, of different lengths."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for number in range(num_problems):
        base = rng.integers(0, 200, tokens)
        for _ in range(samples):
            text = np.where(rng.random(tokens) < 0.15, rng.integers(0, 200, tokens), base)
            text = text[: int(rng.integers(tokens // 2, tokens))].astype(np.int32)
            rollouts.append(RecordedRollout(number, np.array([number, 7], np.int32), text))
    return rollouts


def run(engine, rollouts, batch=4):
    return list(simulate(rollouts, build_drafter("suffix", max_draft_tokens=engine.k), engine, batch=batch))


def test_the_budget_pays_where_tokens_are_free_and_stays_out_where_they_are_not():
    rollouts, others = phase_rollouts(), phase_rollouts(seed=1)
    for cost in (UNIT_COST, STEEP):
        budget = Engine(cost, 4, budget=Budget())
        run(budget, others, batch=6)
        engines = budget, *(Engine(cost, 4, [(1, 1, k)]) for k in (0, 1, 2, 4))
        phases = [run(engine, rollouts, batch=6) for engine in engines]
        assert len({steps[-1].tokens for steps in phases}) == 1
        ours, none, *always = (sum(step.seconds for step in steps) for steps in phases)
        if cost is UNIT_COST:
            assert ours < 0.8 * none
            assert ours < 1.1 * min(always)
        else:
            assert ours < 1.02 * none
            assert always[-1] > 1.2 * none


def test_k_follows_the_number_of_requests_and_whether_drafts_pay():
    """All requests have as many draft tokens, whatever was found."""
    rollouts = phase_rollouts()
    steps = run(Engine(UNIT_COST, 4, [(1, 2, 4), (3, 3, 1), (4, 4, 0)]), rollouts)
    assert {(step.num_requests, step.num_draft_tokens) for step in steps} == {(1, 4), (2, 8), (3, 3), (4, 0)}
    share = {}
    for cost in (UNIT_COST, STEEP):
        engine = Engine(cost, 4, schedule=Schedule(4))
        share[cost is STEEP] = np.mean([step.num_draft_tokens > 0 for _ in range(3) for step in run(engine, rollouts)])
    assert share[False] > 0.5 > 0.3 > share[True]


def test_a_step_with_several_passes_goes_on_after_requests_have_ended():
    """And the next one begins with them: it was scheduled before that was known."""
    text = np.arange(12, dtype=np.int32)
    rollouts = [RecordedRollout(n, PROMPT, text[:size]) for n, size in enumerate((12, 4, 6))]
    steps = run(Engine(STEEP, 4, [(1, 1, 0)], passes=4), rollouts, batch=2)
    # A prompt's step has one pass. Each rollout's first token takes none, and the third waits for the second's place.
    assert [step.num_passes for step in steps] == [1, *[4] * 8, 1, *[4] * 4]
    assert [step.num_requests for step in steps] == [2, 2, 2, 1, 1, 1, 1, 1, 1, 2, 2, 1, 1, 1]
    assert [step.num_wasted for step in steps] == [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1]
    assert steps[-1].tokens == 22


def test_where_the_host_is_slow_a_step_has_several_passes():
    cost, slow = EngineCost(np.array([1.0, 2.0]), np.full(2, 1e-3)), ((9e-3, 0.0), (0.0, 0.0), (1e-3, 0.0))
    for seconds, most in ((UNIT_COST.host_seconds, 1.5), (slow, 4)):
        steps = run(
            Engine(cost._replace(host_seconds=seconds), 4, [(1, 1, 0)], passes=NumPasses()), phase_rollouts(1, 1, 900)
        )
        passes = np.mean([step.num_passes for step in steps[len(steps) // 2 :]])
        assert (passes > 3) == (most == 4), passes


def test_the_host_works_once_for_a_step_and_a_little_for_each_further_pass():
    cost = STEEP._replace(host_seconds=((1000.0, 2.0), (0.0, 0.0), (100.0, 1.0)))
    assert [cost.host(4, num_passes=n) for n in (1, 2, 4)] == [1008, 1112, 1320]
    assert cost.whole_step(4, 8, num_passes=4) == pytest.approx(1320, rel=1e-3)
    assert STEEP.whole_step(4, 8, num_passes=3) == pytest.approx(36)


def test_a_step_takes_what_its_requests_cost_and_more_than_the_host():
    cost = STEEP._replace(request_seconds=10.0)
    assert [cost.whole_step(1, 0), cost.whole_step(4, 0), cost.whole_step(4, 8)] == pytest.approx([11, 44, 52])
    equal = 52 * 2 ** (1 / 3)
    for of_host, seconds, rel in (((5.0, 0.0), 52, 1e-3), ((1000.0, 2.0), 1008, 1e-3), ((52.0, 0.0), equal, 1e-6)):
        with_host = cost._replace(host_seconds=(of_host, *UNIT_COST.host_seconds[1:]))
        assert with_host.whole_step(4, 8) == pytest.approx(seconds, rel=rel)
    verifying = cost._replace(verify_seconds=7.0)
    assert [verifying.whole_step(4, 0), verifying.whole_step(4, 8)] == pytest.approx([44, 52 + 7])
    assert cost._replace(draft_seconds=(3.0, 0.5)).drafting(4) == 5
