"""Train the demo model's tokenizer: byte-level BPE of 8156 entries and the 36 markers of the GLM
prompt format.

Digits never merge, and no digit takes a leading blank, so a number is always its digits in order.
Run: python -m tools.train_demo.tokenizer
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.train_demo.data.corpus import iter_documents
from tools.train_demo.data.render import segments
from tools.train_demo.data.text import MODEL_DIR
from twining.demo.tasks import MAKERS, Split, pick_effort, retrieval

NUM_BPE = 8156
# (text, special): order and flags of chat_format.md section 1.
MARKERS: tuple[tuple[str, bool], ...] = (
    ("<|endoftext|>", True), ("[MASK]", True), ("[gMASK]", True), ("[sMASK]", True), ("<sop>",
    True), ("<eop>", True),
    ("<|system|>", True), ("<|user|>", True), ("<|assistant|>", True), ("<|observation|>", True),
    ("<|begin_of_image|>", True), ("<|end_of_image|>", True), ("<|begin_of_video|>", True),
    ("<|end_of_video|>", True),
    ("<|begin_of_audio|>", True), ("<|end_of_audio|>", True), ("<|begin_of_transcription|>", True),
    ("<|end_of_transcription|>", True), ("<|code_prefix|>", True), ("<|code_middle|>", True),
    ("<|code_suffix|>", True),
    ("<think>", False), ("</think>", False), ("<tool_call>", False), ("</tool_call>", False),
    ("<tool_response>", False), ("</tool_response>", False), ("<arg_key>", False), ("</arg_key>",
    False),
    ("<arg_value>", False), ("</arg_value>", False), ("/nothink", False), ("<|begin_of_box|>",
    False),
    ("<|end_of_box|>", False), ("<|image|>", True), ("<|video|>", True),
)  # fmt: skip
_SPLIT = r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_NUM_EXAMPLES = 6000  # conversations per task in the training text


def _texts() -> Iterator[str]:
    for doc in iter_documents():
        yield doc.text
    rng = Random(20_240_501)
    for _ in range(_NUM_EXAMPLES):
        for make in MAKERS.values():
            example = make(rng, Split.TRAIN, pick_effort(rng))
            yield from (s.text for s in segments(example) if not s.is_marker)
        yield retrieval.draw_fact(rng, Split.TRAIN).sentence


def train() -> Tokenizer:
    """The trained tokenizer with its markers."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BPE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16, show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(_texts(), trainer)
    if tokenizer.get_vocab_size() != NUM_BPE:
        raise AssertionError(
            f"{tokenizer.get_vocab_size()} BPE entries, wanted {NUM_BPE}: too little text"
        )
    for text, special in MARKERS:
        token = AddedToken(text, special=special, normalized=False)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text, _ in MARKERS}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_048_576,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "[MASK]",
        "additional_special_tokens": [text for text, special in MARKERS if special],
    }
    generation = {
        "eos_token_id": [ids["<|endoftext|>"], ids["<|user|>"], ids["<|observation|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }
    for name, value in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(MODEL_DIR, train())
