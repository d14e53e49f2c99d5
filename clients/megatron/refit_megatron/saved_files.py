"""Whether every item of a saved checkpoint is whole on disk, optimizer state included, by its archives' checksums.

A torch_dist checkpoint is files of items, each of them an archive that torch.save wrote, with a CRC-32 per record that
torch.load does not look at. Knows neither names of weights nor versions; `refit_megatron.saved` calls it, and writers
of watched saves do for the digest of their files.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from refitd.domain.digest import MASK64, digest_text

_BLOCK_BYTES = 1 << 20


def files_part(paths: Iterable[Path]) -> int:
    """These files' part of the digest of a checkpoint's files; parts add up modulo 2**64. Reads them; blocks.

    Over names, sizes and CRC-32s: it tells a file that another save wrote, which no checksum inside it does.
    """
    total = 0
    for path in paths:
        size = found = 0
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                size, found = size + len(block), zlib.crc32(block, found)
        text = f"{path.name} {size} {found}".encode()
        total += int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
    return total & MASK64


def files_digest(path: Path, items: Mapping[MetadataIndex, _StorageInfo]) -> str:
    """Of all files that the checkpoint refers to. Raises OSError if one is gone."""
    return digest_text(files_part(path / name for name in {item.relative_path for item in items.values()}))


def damaged_items(path: Path, items: Mapping[MetadataIndex, _StorageInfo]) -> dict[str, str]:
    """Keys of items whose bytes are missing or not those that were written, with the reason. Reads everything; blocks.

    Memory is that of the largest item. Items that are no plain archive of torch.save are checked for their length only,
    and so are all of them if none has a checksum that fits (torch.serialization.set_crc32_options(False)).
    """
    damaged: dict[str, str] = {}
    mismatched: dict[str, str] = {}
    checked = 0
    for index, item in sorted(items.items(), key=lambda pair: (pair[1].relative_path, pair[1].offset)):
        key = index.fqn
        try:
            with (path / item.relative_path).open("rb") as stream:
                stream.seek(item.offset)
                content = stream.read(item.length)
        except OSError as error:
            damaged.setdefault(key, f"{item.relative_path}: {error.strerror or error}")
            continue
        if len(content) != item.length:
            damaged.setdefault(key, f"{item.relative_path} ends {item.length - len(content)} bytes too early")
            continue
        if getattr(item, "transform_descriptors", None):
            continue
        checked += 1
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                if (record := archive.testzip()) is not None:
                    mismatched.setdefault(key, f"{item.relative_path}: the checksum of {record} does not fit its bytes")
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
            damaged.setdefault(key, f"{item.relative_path}: {error}")
    return damaged | (mismatched if len(mismatched) < checked else {})
