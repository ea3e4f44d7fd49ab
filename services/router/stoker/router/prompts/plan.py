"""From a prompt to what the decision needs: token count and block keys.

Long prompts are worked on in threads: tokenizing on the event loop would stall every other request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Executor

import msgspec
import xxhash
from msgspec.structs import replace

from stoker.common.blocks import block_keys, pack_tokens, root_key
from stoker.common.errors import FieldViolation, InvalidRequest
from stoker.router import core, metrics
from stoker.router.fleet.pools import Pool
from stoker.router.prompts.prompt import TOKENIZE, Asked, Prompt, Tokenized
from stoker.router.prompts.render import MEDIA_MARK, Conversation, NotRendered, media_of
from stoker.router.prompts.segments import TooMuchNew
from stoker.router.prompts.tokenizer import ModelTokenizer
from stoker.router.prompts.tokenizer_store import TokenizerStore

TOKENS, MEDIA, BYTES, NONE = "tokens", "media", "bytes", "none"

_GUESSED_OUTPUT_TOKENS = 256
_BYTES_PER_TOKEN = 4
_HASHED_BYTES = 64
# How many tokens an image becomes is the model's affair: of the order of a thousand in most.
_GUESSED_MEDIA_TOKENS = 1024
# Of texts up to this it is asked at once how much is new: that takes some two microseconds a kilobyte.
_LOOKED_UP_BYTES = 128 * 1024
# A few huge prompts can keep all threads busy for a minute; those behind them go without keys.
_PATIENCE_S = 2.0
# A text that the engine shall cut is tokenized up to this many times the longest that could fit.
_CUT_TEXT = 4
# More than any engine takes. Its refusal is awaited: until then a replica must not look loaded without bound.
_MOST_OUTPUT_TOKENS = 16_777_216
# Prompts of keys over bytes live apart from those over tokens: their keys must never meet.
_BYTES_DOMAIN = "\0bytes"
_SESSION_DOMAIN = "\0session"


class Plan(msgspec.Struct, frozen=True):
    """A request ready to be decided. `tokens` is None where they could not be had: then `why` says why."""

    pool: Pool
    request: core.Request
    policy: str
    source: str
    why: str = ""
    tokens: int | None = None
    output_bounded: bool = True
    """Its caller has said how many tokens it generates at most."""
    pinned: str = ""
    """Replica that alone can serve it; empty for any."""
    ids: bytes = b""
    """The token ids of its one text or conversation, little-endian u32; empty where it is none, or is to be cut."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer that it was read with."""


Basis = tuple[ModelTokenizer | None, int, int, int]
"""What a plan rests on beside the request: tokenizer, block size, and the pool's limits."""


class _Read(msgspec.Struct, frozen=True):
    keys: Sequence[int]
    tokens: int
    source: str
    why: str = ""
    ids: bytes = b""
    tokenizer: str = ""


class Planner:
    """Plans requests with the tokenizers at hand."""

    def __init__(
        self, tokenizers: TokenizerStore, executor: Executor, inline_bytes: int, patience_s: float = _PATIENCE_S
    ) -> None:
        """`patience_s`: how long a long prompt waits for its tokens, seconds, before it goes where load is least."""
        self._patience_s = patience_s
        self._tokenizers = tokenizers
        self._executor = executor
        self._inline_bytes = inline_bytes

    def basis(self, pool: Pool) -> Basis:
        """What plans of a pool rest on now: where it is the same again, so is the plan of the same request."""
        tokenizer = self._tokenizers.get(pool.tokenizer_sha256)
        return tokenizer, pool.block_size, pool.max_model_len, pool.max_output_tokens

    async def plan(self, asked: Asked, pool: Pool, adapter: str, policy: str) -> Plan:
        """Count and hash. Raises InvalidRequest for a prompt that no replica can take."""
        plan = self.plan_at_once(asked, pool, adapter, policy)
        if plan is not None:
            return plan
        return _planned(asked, pool, adapter, policy, await self._read_in_thread(asked.prompt, pool, adapter))

    def plan_at_once(self, asked: Asked, pool: Pool, adapter: str, policy: str) -> Plan | None:
        """The same where that holds up nobody; None for what is a thread's work."""
        prompt = asked.prompt
        _refuse_long_output(prompt, pool)
        if asked.api == TOKENIZE:
            # No KV is computed: speculation on it would send others after blocks that are not there.
            read = _Read((), 1, NONE, TOKENIZE)
        elif policy == core.ROUND_ROBIN:
            # The baseline looks at nothing.
            read = _Read((), _guessed(prompt), NONE, policy)
        # Hashing alone costs a byte some hundred times less than tokenizing.
        elif _weight(prompt) > self._inline_bytes and not _may_be_known(prompt):
            return None
        else:
            started = time.perf_counter()
            try:
                read = self._read(prompt, pool.tokenizer_sha256, pool, adapter, most_new=self._inline_bytes)
            except TooMuchNew:
                return None
            metrics.of(metrics.TOKENIZE, "inline").observe(time.perf_counter() - started)
        return _planned(asked, pool, adapter, policy, read)

    async def said(
        self, prompt: Prompt, pool: Pool, tokens: Sequence[int], *, skip_special_tokens: bool
    ) -> tuple[list[int], list[str]] | None:
        """The tokens of a prompt, and the text that each token said after it adds; None where they cannot be had."""

        def read() -> tuple[list[int], list[str]] | None:
            tokenizer = self._tokenizers.get(pool.tokenizer_sha256)
            try:
                lists = tokens_of(prompt, tokenizer, pool.max_model_len)
                if tokenizer is None or lists is None or len(lists) != 1:
                    return None
                return list(lists[0]), tokenizer.pieces(lists[0], tokens, skip_special_tokens=skip_special_tokens)
            except (NotRendered, InvalidRequest, ValueError):
                return None

        try:
            async with asyncio.timeout(self._patience_s):
                return await asyncio.get_running_loop().run_in_executor(self._executor, read)
        except TimeoutError:
            return None

    async def _read_in_thread(self, prompt: Prompt, pool: Pool, adapter: str) -> _Read:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._patience_s):
                read = await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._read, prompt, pool.tokenizer_sha256, pool, adapter
                )
        except TimeoutError:
            read = _Read((), _guessed(prompt), NONE, "tokenizers_busy")
        metrics.of(metrics.TOKENIZE, "thread").observe(time.perf_counter() - started)
        return read

    def _read(self, prompt: Prompt, fingerprint: str, pool: Pool, adapter: str, most_new: int | None = None) -> _Read:
        read = _read(prompt, self._tokenizers.get(fingerprint), pool, adapter, most_new)
        return replace(read, tokenizer=fingerprint) if read.ids else read


def _weight(prompt: Prompt) -> int:
    """How many bytes of text would take as long to read."""
    return len(prompt.tokenized.packed) // _HASHED_BYTES if prompt.tokenized is not None else prompt.size


def _may_be_known(prompt: Prompt) -> bool:
    return len(prompt.texts) == 1 and prompt.size <= _LOOKED_UP_BYTES


def _planned(asked: Asked, pool: Pool, adapter: str, policy: str, read: _Read) -> Plan:
    prompt, tokenizes = asked.prompt, asked.api == TOKENIZE
    metrics.of(metrics.KEYS, read.source, read.why).inc()
    session = root_key(_SESSION_DOMAIN, cache_salt=asked.session_id) if asked.session_id else 0
    output = prompt.max_output_tokens if prompt.max_output_tokens is not None else _GUESSED_OUTPUT_TOKENS
    request = core.Request(
        # Keys over bytes are forgotten within seconds; a session's home stays.
        keys=() if session and read.source == BYTES else read.keys,
        prompt_tokens=_counted(read, pool),
        block_size=pool.block_size,
        output_tokens=0 if tokenizes else min(output * prompt.choices, _MOST_OUTPUT_TOKENS),
        adapter=adapter,
        session=session,
        streamed=asked.stream,
    )
    return Plan(
        pool,
        request,
        policy,
        read.source,
        read.why,
        read.tokens if read.source == TOKENS else None,
        output_bounded=prompt.max_output_tokens is not None,
        ids=read.ids,
        tokenizer=read.tokenizer,
    )


def _guessed(prompt: Prompt) -> int:
    """Tokens of a prompt that nobody counts here."""
    told = prompt.tokenized
    return max(1, (told.tokens or len(told.packed) // 4) if told is not None else prompt.size // _BYTES_PER_TOKEN)


def _counted(read: _Read, pool: Pool) -> int:
    # An estimate that no engine would take must not make its replica look busy for minutes.
    if read.source == TOKENS or not pool.max_model_len:
        return read.tokens
    return min(read.tokens, pool.max_model_len)


def _read(
    prompt: Prompt, tokenizer: ModelTokenizer | None, pool: Pool, adapter: str, most_new: int | None = None
) -> _Read:
    """Tokens and keys where possible, keys over bytes otherwise. Raises TooMuchNew for texts, by `most_new`."""
    if prompt.tokenized is not None:
        return _read_tokenized(prompt.tokenized, pool, adapter, prompt.cache_salt)
    why = prompt.unreadable
    if not why:
        root = root_key(pool.model, lora=adapter, cache_salt=prompt.cache_salt)
        try:
            if tokenizer is not None and prompt.conversation is not None and media_of(prompt.conversation):
                return _read_media(prompt, prompt.conversation, tokenizer, pool, root)
            token_lists = tokens_of(prompt, tokenizer, pool.max_model_len, most_new)
        except NotRendered:
            why = "not_rendered"
        else:
            if token_lists is not None:
                tokens = sum(map(len, token_lists))
                _refuse_long_prompt(tokens, len(token_lists), pool.max_model_len)
                # Several prompts in one request are usually kin: the first one leads.
                packed = pack_tokens(token_lists[0])
                keys = pool.remembered.of(packed, pool.block_size, root)
                whole = len(token_lists) == 1 and not prompt.token_ids and prompt.truncate_to is None
                return _Read(keys, tokens, TOKENS, ids=packed if whole else b"")
            why = "no_tokenizer"
    raw = _canonical(prompt)
    if pool.max_model_len:
        # What is beyond is no prompt: it is an image, or will be refused.
        raw = raw[: _BYTES_PER_TOKEN * pool.max_model_len]
    units = array("I", raw + b"\0" * (-len(raw) % 4))
    root = root_key(pool.model + _BYTES_DOMAIN, lora=adapter, cache_salt=prompt.cache_salt)
    return _Read(block_keys(units, pool.block_size, root), max(1, len(units)), BYTES, why)


def _read_tokenized(prompt: Tokenized, pool: Pool, adapter: str, cache_salt: str) -> _Read:
    if not prompt.packed:
        if prompt.block_size != pool.block_size:
            raise InvalidRequest.field("block_size", f"is {pool.block_size} for {pool.model}; make the keys for that")
        _refuse_long_prompt(prompt.tokens, 1, pool.max_model_len)
        if len(prompt.keys) != prompt.tokens // pool.block_size:
            raise InvalidRequest.field(
                "block_keys",
                f"{prompt.tokens} tokens are {prompt.tokens // pool.block_size} full blocks of {pool.block_size}, "
                f"not {len(prompt.keys)}",
            )
        return _Read(prompt.keys, prompt.tokens, TOKENS)
    tokens = len(prompt.packed) // 4
    _refuse_long_prompt(tokens, 1, pool.max_model_len)
    root = root_key(pool.model, lora=adapter, cache_salt=cache_salt)
    return _Read(pool.remembered.of(prompt.packed, pool.block_size, root), tokens, TOKENS)


def _read_media(
    prompt: Prompt, conversation: Conversation, tokenizer: ModelTokenizer, pool: Pool, root: int
) -> _Read:
    """Keys of a conversation with images, sounds or videos.

    Up to the first of them the engine's blocks are known by their tokens. Behind it they are not: which tokens and
    hashes media become is the model's affair. There the keys, of the text's tokens and the media's content, are this
    router's own, which brings the next turn to where it sent this one.
    """
    media = media_of(conversation)
    texts = tokenizer.render(conversation).split(MEDIA_MARK)
    if len(texts) != len(media) + 1:
        raise NotRendered("the chat template does not show each image, sound and video once")
    tokens: list[int] = []
    extras: dict[int, list[bytes]] = {}
    for text, part in zip(texts, [*media, None], strict=True):
        tokens += _encode(text, prompt, tokenizer, pool.max_model_len)
        if part is not None:
            content = xxhash.xxh3_128_digest(msgspec.json.encode(part))
            extras.setdefault(len(tokens) // pool.block_size, []).append(content)
    _refuse_long_prompt(len(tokens), 1, pool.max_model_len)
    keys = block_keys(tokens, pool.block_size, root, extras)
    return _Read(keys, len(tokens) + _GUESSED_MEDIA_TOKENS * len(media), MEDIA)


def tokens_of(
    prompt: Prompt, tokenizer: ModelTokenizer | None, max_model_len: int, most_new: int | None = None
) -> list[Sequence[int]] | None:
    """The token ids of each prompt of a request; None without a tokenizer.

    Raises NotRendered, TooMuchNew where more than `most_new` characters of a text were never seen, and InvalidRequest
    for a text so long that it need not be tokenized to be refused.
    """
    if prompt.token_ids:
        lists: list[Sequence[int]] = list(prompt.token_ids)
    elif tokenizer is None:
        return None
    elif prompt.conversation is not None:
        lists = [_encode(tokenizer.render(prompt.conversation), prompt, tokenizer, max_model_len)]
    else:
        lists = [_encode(text, prompt, tokenizer, max_model_len, most_new) for text in prompt.texts]
    limit = prompt.truncate_to
    if limit is None:
        return lists
    if limit < 0:
        # A token of context is held back for the output.
        limit = max_model_len - 1 if prompt.max_output_tokens else max_model_len
    return [tokens[-limit:] if prompt.truncate_left else tokens[:limit] for tokens in lists] if limit else lists


def _encode(
    text: str, prompt: Prompt, tokenizer: ModelTokenizer, max_model_len: int, most_new: int | None = None
) -> Sequence[int]:
    bound = max_model_len * tokenizer.max_chars_per_token
    if bound and prompt.truncate_to is not None and len(text) > _CUT_TEXT * bound:
        raise NotRendered(
            "only a small part of this text would be kept: to count its tokens costs more than it is worth"
        )
    if bound and prompt.truncate_to is None and len(text) > bound:
        raise _refused(
            "input_text",
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{len(text)} characters (more than {bound} characters, which is the upper bound for {max_model_len} "
            "input tokens). Please reduce the length of the input prompt.",
        )
    return tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens, most_new=most_new)


def _canonical(prompt: Prompt) -> bytes:
    if prompt.texts:
        return prompt.texts[0].encode("utf-8", "surrogatepass")
    if prompt.conversation is not None:
        # Tools come first in most templates, and change least.
        with contextlib.suppress(RecursionError):
            return msgspec.json.encode([prompt.conversation.tools, prompt.conversation.messages])
    return prompt.raw


def _refuse_long_output(prompt: Prompt, pool: Pool) -> None:
    wanted, max_model_len, most = prompt.max_output_tokens, pool.max_model_len, pool.max_output_tokens
    if most and wanted is not None and wanted > most:
        raise InvalidRequest.field(
            prompt.max_output_field, f"this deployment allows at most {most}, asked for {wanted}"
        )
    if max_model_len and wanted is not None and wanted > max_model_len:
        raise _refused(
            prompt.max_output_field,
            f"{prompt.max_output_field}={wanted} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
        )


def _refuse_long_prompt(tokens: int, prompts: int, max_model_len: int) -> None:
    # Of several prompts only the sum is at hand: it proves too much only for one.
    if max_model_len and prompts == 1 and tokens > max_model_len:
        raise _refused(
            "input_tokens",
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{tokens} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
        )


def _refused(field: str, says: str) -> InvalidRequest:
    """In the words of the engine, which would refuse it too."""
    return InvalidRequest(says, fields=(FieldViolation(field, says),))
