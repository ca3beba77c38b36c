"""The score: full marks for an oracle, none for nonsense, right counts of drafts."""

from tools.train_demo.data.render import Loss, segments
from tools.train_demo.data.text import MODEL_DIR
from twining.demo import score
from twining.serving.tokenizer import Segment, Tokenizer

SMALL = {"num_per_task": 6, "retrieval_lengths": (300, 600), "num_retrieval": 3, "num_accepted": 2}
TOKENIZER = Tokenizer.load(MODEL_DIR)


def reply_ids(example):
    """Token ids of the reference reply, its stop token included."""
    pieces = segments(example)
    start = max(i for i, p in enumerate(pieces) if p.text == "<|assistant|>")
    return TOKENIZER.encode_segments(
        Segment("S" if p.is_marker else "T", p.text)
        for p in pieces[start:]
        if p.loss is Loss.TARGET
    )


def oracle(effort):
    items = score.plan(TOKENIZER, seed=5, effort=effort, **SMALL)

    def generate(requests):
        assert [r.messages for r in requests] == [i.example.prompt for i in items]
        return [
            score.ChatResult(token_ids=reply_ids(i.example), draft_steps=10, num_accepted=15)
            for i in items
        ]

    return generate


def test_oracle_gets_full_marks():
    for effort in ("low", "high"):
        report = score.score(oracle(effort), TOKENIZER, seed=5, effort=effort, **SMALL)
        for task in ("arithmetic", "json_extraction", "tool_call", "python_functions"):
            assert report[task] == 1.0, task
        assert report["retrieval"] == {300: 3, 600: 3}
        assert set(report["accepted_length"].values()) == {2.5}


def test_nonsense_gets_none():
    def generate(requests):
        ids = TOKENIZER.encode_with_markers("</think>I do not know.")
        return [score.ChatResult(token_ids=ids) for _ in requests]

    report = score.score(generate, TOKENIZER, seed=5, **SMALL)
    assert not any(report[t] for t in ("arithmetic", "json_extraction", "tool_call"))
    assert report["python_functions"] == 0 and report["retrieval"] == {300: 0, 600: 0}
    assert report["accepted_length"] == {}


def test_prompt_lengths():
    items = score.plan(TOKENIZER, num_per_task=1, seed=1, retrieval_lengths=(1024, 2048))
    for item in items:
        if item.group == "retrieval":
            length = len(score.prompt_ids(TOKENIZER, item.request))
            assert int(item.name) - 200 < length <= int(item.name)


def test_plan_depends_on_seed_only():
    a, b, c = (score.plan(TOKENIZER, seed=s, **SMALL) for s in (1, 1, 2))
    assert [i.example for i in a] == [i.example for i in b] != [i.example for i in c]
