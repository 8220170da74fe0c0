"""The texts and comparisons of eval_kv_quality."""

import re

import pytest
from benchlib.kv_generation import Generated, agreement_length, assign, compare, rouge_l
from benchlib.quality_sequences import task_windows, windows
from benchlib.task_texts import KINDS, make_tasks


class Bytes:
    """A tokenizer of bytes after a token 256."""

    def encode(self, text, add_special_tokens=True):
        return [256] * add_special_tokens + list(text.encode())


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_hang_on_the_seed_alone(kind):
    tasks = make_tasks(kind, 20)
    assert tasks == make_tasks(kind, 20) and tasks != make_tasks(kind, 20, seed=1)
    assert len({task.prompt for task in tasks}) == 20
    assert all(task.answer.startswith(" ") and task.answer.endswith(".\n\n") for task in tasks)


def test_worked_maths_is_right():
    for task in make_tasks("maths", 200):
        equations = re.findall(r"[\d+*/ -]+(?:=[\d+*/ -]+)+", task.answer)
        assert equations
        for equation in equations:
            assert len({eval(side) for side in equation.split("=")}) == 1, task


def test_answers_are_in_the_passage():
    for task in make_tasks("qa", 200) + make_tasks("summaries", 200):
        found = set(re.findall(r"\d+|[A-Z]\w+ [A-Z]\w+", task.answer))
        assert all(fact in task.prompt for fact in found), (found, task)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_alone_are_scored(kind):
    for sequence in task_windows(kind, Bytes(), 2000, 3):
        ids = sequence.token_ids
        assert ids[0] == 256 and 1000 < len(ids) <= 2000
        scored = bytes(ids[i + 1] for i in sequence.scored).decode()
        tasks = make_tasks(kind, 20, seed=[s.token_ids for s in task_windows(kind, Bytes(), 2000, 3)].index(ids))
        assert scored == "".join(task.answer for task in tasks)[: len(scored)] and scored.endswith("\n\n")


def test_no_window_where_no_task_fits():
    assert task_windows("qa", Bytes(), 100, 2) == []
    assert [len(s.token_ids) for s in windows(["x" * 25], Bytes(), 11, None)] == [11, 11]


@pytest.mark.parametrize(
    "one, other, length", [("abc", "abc", 3), ("abc", "abd", 2), ("abc", "xbc", 0), ("ab", "abc", 2)]
)
def test_agreement_length(one, other, length):
    assert agreement_length(one, other) == length


def test_the_loss_is_that_of_the_references():
    base = Generated([(1, 2, 3), (4, 5)], ["a b", "c"], ["the hall of Lund", "a bridge of oak"])
    found = Generated([(1, 2, 9), (4, 5)], ["a x", "c"], ["the hall of Graz", "a bridge of oak"])
    figures = compare(base, found, ["the hall of Lund", "a bridge of oak"])
    assert figures["agreement_lengths"] == [2, 2] and figures["identical"] == 1
    assert figures["rouge_l_to_float32"] == pytest.approx((0.5 + 1) / 2)
    assert figures["rouge_l_to_references"] == pytest.approx((0.75 + 1) / 2)
    assert figures["rouge_l_loss"] == pytest.approx(0.125) == figures["rouge_l_loss_error"]
    assert "rouge_l_loss" not in compare(base, found, [])
    assert rouge_l(["数字", "数字"], ["数字", "数"]) == [1, 0]


def test_summaries_are_asked_for_after_examples():
    assignment = assign([[1, 2]], 5, 3, Bytes())
    assert len(assignment.summary_prompts) == len(assignment.references) == 3
    for prompt, reference in zip(assignment.summary_prompts, assignment.references, strict=True):
        text = bytes(prompt[1:]).decode()
        assert text.endswith("\nSummary:") and text.count("Summary:") == 4 and reference not in text
        assert len(reference.encode()) + 3 < assignment.summary_max_tokens
    assert assignment.longest == max(map(len, assignment.summary_prompts)) + assignment.summary_max_tokens
