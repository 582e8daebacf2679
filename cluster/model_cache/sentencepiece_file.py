"""Rebuilds a SentencePiece BPE tokenizer (Llama 2, Mistral) as `tokenizer.json` from a GGUF file's pieces and scores.

SentencePiece keeps no merges: again and again it joins the two neighbours whose union is the piece of highest score.
The `tokenizers` library wants merges in order of rank; so every way to cut a piece in two other pieces becomes a merge,
ranked by the score of the whole. (transformers builds its fast Llama tokenizers in the same way.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.errors import NoSuchModel
from cluster.model_cache.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPACE = "▁"
_BYTES = tuple(f"<0x{value:02X}>" for value in range(256))


def build_sentencepiece(source: GgufFile) -> Tokenizer:
    """Without the post-processor. Raises `NoSuchModel` for a vocabulary that needs more than scores to be split."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pieces: list[str] = source.get("tokenizer.ggml.tokens")
    scores: list[float] = source.get("tokenizer.ggml.scores")
    types: list[int] = source.get("tokenizer.ggml.token_type")
    if not len(pieces) == len(scores) == len(types):
        raise NoSuchModel(f"{source.path} has {len(pieces)} tokens, {len(scores)} scores and {len(types)} types")
    if source.get("tokenizer.ggml.precompiled_charsmap", None):
        raise NoSuchModel(f"{source.path} normalises text by a table, which cannot be converted")
    vocab = {piece: i for i, piece in enumerate(pieces)}
    if any(byte not in vocab for byte in _BYTES):
        raise NoSuchModel(f"{source.path} has no tokens for single bytes, which cannot be converted")
    if any(_SPACE in piece for piece, kind in zip(pieces, types, strict=True) if kind == _USER_DEFINED):
        raise NoSuchModel(f"{source.path} has tokens of its own with spaces in them, which cannot be converted")
    unknown = pieces[int(source.get("tokenizer.ggml.unknown_token_id", 0))]
    whole = (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)
    joined = {piece: score for piece, score, kind in zip(pieces, scores, types, strict=True) if kind not in whole}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges_of(joined, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", _SPACE)
    prefixed = source.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    for piece, kind in zip(pieces, types, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(piece, special=kind != _USER_DEFINED, normalized=False)])
    return tokenizer


def merges_of(scores: dict[str, float], ids: dict[str, int]) -> list[tuple[str, str]]:
    """All ways to join two pieces to a third, the highest score first; those of one piece by the ids of its halves."""
    merges = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                merges.append((-score, ids[piece], ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]
