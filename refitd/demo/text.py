"""The demo's training text, tokenizer and model description, all made here and now without a network.

The text is what every machine with Python has: the docstrings of the standard library. Run as a child process,
`python -m refitd.demo.text WORKSPACE`, because it needs `tokenizers`; writes `model/` (config.json and tokenizer, as a
Hugging Face checkpoint without weights), `tokens.bin` (little-endian uint16) and `prompt.json`.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from refitd.demo.events import Finished, Progressed, emit, take_stdout

TEXT_CHARACTERS = 1_000_000
VOCAB_SIZE = 1000
END_OF_TEXT = "<|endoftext|>"
PROMPT = "Return a new list that"
# Small enough for two ranks and an engine on two cores; the head dimension is what vLLM's CPU attention takes.
CONFIG: dict[str, str | int | float | bool | list[str] | None] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_cache": True,
}
# Not documentation for readers: tests, generated tables, and packages that are not the standard library.
LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__", "encodings"}


def docstrings(root: Path, limit: int) -> Iterator[str]:
    """Docstrings of modules, classes and functions under `root`, in the order of paths, up to `limit` characters."""
    left = limit
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 40:
                    yield text
                    left -= len(text)
                    if left <= 0:
                        return


def write_workspace(workspace: Path) -> int:
    """Writes everything; returns the number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = list(docstrings(Path(sysconfig.get_paths()["stdlib"]), TEXT_CHARACTERS))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)

    model = workspace / "model"
    model.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(model / "tokenizer.json"))
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    _write(model / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    _write(model / "config.json", CONFIG)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.extend(encoding.ids)
        ids.append(0)
    np.asarray(ids, dtype="<u2").tofile(workspace / "tokens.bin")
    _write(workspace / "prompt.json", {"text": PROMPT, "ids": tokenizer.encode(PROMPT + texts[0][:200]).ids[:48]})
    return len(ids)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def main() -> None:
    stream = take_stdout()
    emit(stream, Progressed("text", "reading the standard library's docstrings"))
    count = write_workspace(Path(sys.argv[1]))
    emit(stream, Progressed("text", f"{count} tokens"))
    emit(stream, Finished("text"))


if __name__ == "__main__":
    main()
