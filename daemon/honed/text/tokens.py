"""Tokens of a text, with a mask over those of its trained spans.

A fast tokenizer gives every token's place in the text. Offsets that contradict the tokens of the first texts, and those
of a tokenizer that has none, are replaced by tokenizing the text before every boundary.

Offsets take longer to fetch than the mask needs. Where the spellings of a text's tokens, one after the other, are that
text, byte by byte, and every span begins and ends with a token, the lengths of the spellings give the same mask.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from honed.system import quote
from honed.system.error import ModelError
from honed.text.span import Span, common, has_gaps, lost_space, range_by_offset, squeeze, token_ends

#: Rows whose boundaries are computed both ways, from offsets and from token prefixes, before offsets are trusted; and
#: whose tokens the tokenizer and its backend both make, before the backend is called directly.
_NUM_OFFSET_TRIALS = 8

#: The text of tokens [a, b).
Pieces = Callable[[int, int], str]
#: Token ids, the mask over those that are trained on, and their text.
Masked = tuple[list[int], list[bool], Pieces]


class Tokens:
    """A tokenizer, and whether its offsets can be trusted."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._has_offsets = bool(getattr(tokenizer, "is_fast", False))
        self._num_trials = 0
        self._backend = _plain_backend(tokenizer)
        self._spellings: list[bytes] | None = None  # by token id; read once offsets are trusted
        self._num_spelled_trials = 0
        self._kept: dict[tuple[str, str, str], str | None] = {}  # white space by what it stands between
        self.bos_ids = self._leading_ids()
        self.eos_id: int | None = tokenizer.eos_token_id

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def with_bos(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self.bos_ids)] == self.bos_ids else [*self.bos_ids, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def lost_space(self, said: str, shown: str) -> Span | None:
        """Return the first white space of `said` that `shown`, decoded from tokens, has lost; None if it has all."""
        return lost_space(said, shown, self._marks, self._keeps)

    @cached_property
    def _marks(self) -> list[str]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return [text for token in added.values() if (text := str(token)).strip()]

    def _keeps(self, before: str, gap: str, after: str) -> str | None:
        """Return the white space that remains of some between two letters, when it is tokenized and decoded."""
        key = (before, gap, after)
        if key not in self._kept:
            text = self.decode(self.ids(before + gap + after)).strip()
            is_whole = text.startswith(before) and text.endswith(after) and len(text) > 1
            self._kept[key] = text[1:-1].replace("▁", " ") if is_whole else None
        return self._kept[key]

    def _check_space(self, text: str, ids: list[int]) -> None:
        """Raise ModelError if the tokens lack white space between words: the offsets do not show it."""
        if (place := self.lost_space(text, self.decode(ids))) is not None:
            a, b = place
            around = quote.mark(repr(text[max(0, a - 16) : b + 16]))
            raise ModelError(
                f"the base model's tokenizer loses the white space of {around}: it would be trained without",
                hint="its tokenizer.json does not suit its vocabulary: copy the tokenizer again from its source",
            )

    def mask(self, text: str, spans: Sequence[Span]) -> Masked | None:
        """Return ids and mask of the text tokenized as one; None if a token reaches from a turn into other words."""
        if not self._is_direct:
            return self._located(text, spans, None)
        encoded = self._backend.encode(text, add_special_tokens=False)
        spelled = self._spelled(text, spans, encoded.ids)
        if spelled is not None and self._num_spelled_trials >= _NUM_OFFSET_TRIALS:
            return spelled
        located = self._located(text, spans, encoded)
        if spelled is not None:
            self._num_spelled_trials += 1
            if located is None or located[:2] != spelled[:2]:
                self._spellings = []
        return located

    @property
    def _is_direct(self) -> bool:
        """True once the backend's offsets are known to be as the tokenizer's, and right."""
        return self._has_offsets and self._num_trials >= _NUM_OFFSET_TRIALS and _is_plain(self._backend)

    def _spelled(self, text: str, spans: Sequence[Span], ids: list[int]) -> Masked | None:
        """Return ids and mask by the spellings of the tokens; None where these do not settle them."""
        if text[:1].isspace() and any(a == 0 for a, _ in spans):
            return None  # offsets may leave a first space out
        if self._spellings is None:
            self._spellings = list(_spellings(self.tokenizer))
        data = text.encode(errors="surrogatepass")
        try:
            spelled = list(map(self._spellings.__getitem__, ids))
        except IndexError:
            return None
        if b"".join(spelled) != data:
            return None
        ends, is_ascii = [0, *accumulate(map(len, spelled))], len(data) == len(text)
        trained = [False] * len(ids)
        for a, b in spans:
            low, high = (a, b) if is_ascii else (len(text[:n].encode(errors="surrogatepass")) for n in (a, b))
            first, last = bisect_right(ends, low) - 1, bisect_right(ends, high) - 1
            if ends[first] != low or ends[last] != high:
                return None
            trained[first:last] = [True] * (last - first)

        def pieces(a: int, b: int) -> str:
            return self._pieces(text, ids, self._ids_and_ends(text)[1])(a, b)

        return ids, trained, pieces

    def _located(self, text: str, spans: Sequence[Span], encoded: Any) -> Masked | None:
        """Return ids and mask by the tokens' offsets, or by the tokens of the text before every boundary. `encoded` is
        the backend's result, if it is there already."""
        ids, ends = self._ids_and_ends(text, encoded)
        if ends is None:
            ranges = [self._range_by_prefix(text, ids, span) for span in spans]
        else:
            ranges = [range_by_offset(text, ends, span) for span in spans]
            if self._num_trials < _NUM_OFFSET_TRIALS:
                self._num_trials += 1
                if ranges != [self._range_by_prefix(text, ids, span) for span in spans]:
                    ends = self._distrust(text, ends)
                    ranges = [self._range_by_prefix(text, ids, span) for span in spans]
        if any(token_range is None for token_range in ranges):
            return None
        trained = [False] * len(ids)
        for token_range in ranges:
            assert token_range is not None
            trained[slice(*token_range)] = [True] * (token_range[1] - token_range[0])
        return ids, trained, self._pieces(text, ids, ends)

    def mask_apart(self, text: str, spans: Sequence[Span]) -> Masked:
        """Return ids and mask with the text cut at the turns' ends first, as in generation: prompt, then answer."""
        ids: list[int] = []
        trained: list[bool] = []
        cuts = [0, *[cut for span in spans for cut in span], len(text)]
        for n, (a, b) in enumerate(pairwise(cuts)):
            part = self.ids(text[a:b])
            ids += part
            trained += [n % 2 == 1] * len(part)
        return ids, trained, self._pieces(text, ids, None)

    def _distrust(self, text: str, ends: list[int]) -> list[int] | None:
        """Keep offsets that contradict the tokens if they account for the text by decoding; else distrust all."""
        ids = self.ids(text)
        cuts = [n for n in range(0, len(ids), max(1, len(ids) // 16)) if n and ends[n - 1] != ends[n]]
        if all(squeeze(self.decode(ids[:n])) == squeeze(text[: ends[n - 1]]) for n in cuts):
            return ends
        self._has_offsets = False
        return None

    def _pieces(self, text: str, ids: list[int], ends: list[int] | None) -> Pieces:
        if ends is None:
            return lambda a, b: self.decode(ids[a:b])
        return lambda a, b: text[ends[a - 1] if a else 0 : ends[b - 1] if b < len(ends) else len(text)] if b else ""

    def _ids_and_ends(self, text: str, encoded: Any = None) -> tuple[list[int], list[int] | None]:
        """Return token ids and the end of each in the text; no ends where the tokenizer's offsets are unusable."""
        if not self._has_offsets:
            return self.ids(text), None
        if self._is_direct:
            encoding = encoded or self._backend.encode(text, add_special_tokens=False)
            return encoding.ids, self._ends(text, encoding.ids, encoding.offsets)
        batch = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = batch["input_ids"], batch["offset_mapping"]
        if _is_plain(self._backend):
            encoding = self._backend.encode(text, add_special_tokens=False)
            if (encoding.ids, encoding.offsets) != (
                ids,
                offsets,
            ):  # the tokenizer's own code changes what its backend makes
                self._backend = None
        return ids, self._ends(text, ids, offsets)

    def _ends(self, text: str, ids: list[int], offsets: Sequence[Span]) -> list[int] | None:
        ends = token_ends(text, offsets)
        if ends is None or has_gaps(offsets):
            self._check_space(text, ids)
        return ends

    def _range_by_prefix(self, text: str, ids: list[int], span: Span) -> Span | None:
        """Return the tokens of a span, found by tokenizing the text before its start and before its end."""
        start, before, _ = self._boundary(text, ids, span[0])
        end, _, after = self._boundary(text, ids, span[1])
        if before.strip() or (after.strip() and end < len(ids)):
            return None
        return start, end + (1 if after and end < len(ids) else 0)

    def _boundary(self, text: str, ids: list[int], position: int) -> tuple[int, str, str]:
        """Return (n, before, after): tokens [0, n) end by the position, and token n crosses it with these texts."""
        prefix = self.ids(text[:position])
        n = common(prefix, ids)
        if n == len(prefix):
            return n, "", ""
        target = len(self.decode(prefix))
        while n < len(ids) and len(self.decode(ids[: n + 1])) <= target:
            n += 1
        before = self.decode(prefix)[len(self.decode(ids[:n])) :]
        return n, before, self.decode(ids[: n + 1])[target:] if before else ""

    def _leading_ids(self) -> list[int]:
        """Return the ids that the tokenizer puts before any text: bos, or nothing."""
        bare, full = self.ids("a"), self.tokenizer("a")["input_ids"]
        return next((full[:n] for n in range(len(full)) if full[n : n + len(bare)] == bare), [])


def _spellings(tokenizer: Any) -> Iterator[bytes]:
    """Yield the bytes that every token of a fast tokenizer may stand for, by id; whether they do is for a text to
    show."""
    backend = tokenizer.backend_tokenizer
    added = {number: token.content for number, token in backend.get_added_tokens_decoder().items()}
    letters = _byte_letters()
    is_by_bytes = "ByteLevel" in str(backend.decoder)
    for number in range(backend.get_vocab_size(with_added_tokens=True)):
        token = backend.id_to_token(number) or ""
        if number in added:
            yield added[number].encode()
        elif is_by_bytes and all(letter in letters for letter in token):
            yield bytes(letters[letter] for letter in token)
        elif len(token) == 6 and token.startswith("<0x"):
            yield bytes.fromhex(token[3:5])
        else:
            yield token.replace("▁", " ").encode()


def _byte_letters() -> dict[str, int]:
    """Return the letters by which byte-level tokenizers spell bytes: printable ones are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [number for number in range(256) if number not in printable]
    return {chr(item): item for item in printable} | {chr(256 + n): other for n, other in enumerate(others)}


#: The modules of transformers that call a tokenizer's backend; those of single families change texts first.
_TRANSFORMERS = "transformers.tokenization_"


def _plain_backend(tokenizer: Any) -> Any:
    """Return a fast tokenizer's backend, a call of which takes less time; None if the tokenizer sets it up."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_simple = getattr(tokenizer, "is_fast", False) and not getattr(tokenizer, "split_special_tokens", False)
    own = (item for item in type(tokenizer).__mro__ if not item.__module__.startswith(_TRANSFORMERS))
    is_simple = is_simple and not any(name in item.__dict__ for item in own for name in ("__call__", "_encode_plus"))
    return backend if is_simple and hasattr(backend, "encode") else None


def _is_plain(backend: Any) -> bool:
    """Return True for a backend that neither truncates nor pads, as an earlier call of its tokenizer may have asked."""
    return backend is not None and backend.truncation is None and backend.padding is None
