"""What a model is made of: the tensors of each layer, as far as memory, arithmetic and traffic depend on them.

Parameters are counted exactly from shapes. Sources of shapes: the models' published `config.json`; attention with
grouped queries arXiv:2305.13245, multi-head latent attention (MLA) arXiv:2405.04434 §2.1, experts arXiv:2401.06066.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Format:
    """How numbers are stored, and by which arithmetic they are multiplied.

    `bits` are those of one number, scales and zero points included. `arithmetic` is a key of `GpuType.flops`. `block`
    rows or columns share a scale and cannot be cut apart.
    """

    name: str
    bits: float
    arithmetic: str = "bf16"
    block: int = 1

    @property
    def bytes(self) -> float:
        """Of one number."""
        return self.bits / 8.0


BF16 = Format("bf16", 16.0)
NEAR = 0.03
"""Share by which what is counted and what files hold may differ."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Parameters of one kind: what tensor parallelism divides, and what each rank holds whole.

    `divided` by whom is said where they are used. `format` is how they are stored.
    """

    divided: float = 0.0
    whole: float = 0.0
    format: Format = BF16

    @property
    def parameters(self) -> float:
        """All of them, once."""
        return self.divided + self.whole

    @property
    def bytes(self) -> float:
        """Of all of them, once."""
        return self.parameters * self.format.bytes

    def times(self, factor: float) -> Tensors:
        """So many of the same."""
        return Tensors(factor * self.divided, factor * self.whole, self.format)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: what is cached is `rank + rope` numbers a token, whatever the number of heads.

    `query_rank` is 0 where queries are not compressed. `nope` and `rope` are the channels of a head without and with
    position.
    """

    rank: int
    nope: int
    rope: int
    query_rank: int = 0


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention. `kv_heads` equal to `heads` is plain multi-head, 1 is multi-query.

    `head` and `value_head` are channels of one head. `window` is how far a token looks back, 0 without limit;
    `bias` and `norms` are further parameters.
    """

    heads: int
    kv_heads: int
    head: int
    value_head: int
    window: int = 0
    latent: Latent | None = None
    query_bias: bool = False
    output_bias: bool = False
    norms: float = 0.0
    format: Format = BF16

    @property
    def kv_values(self) -> int:
        """Numbers cached for each token."""
        if self.latent:
            return self.latent.rank + self.latent.rope
        return self.kv_heads * (self.head + self.value_head)

    def queries_and_output(self, width: int) -> Tensors:
        """Tensors that are divided by heads; for MLA with what every rank computes whole."""
        out = self.heads * self.value_head * width + (width if self.output_bias else 0)
        if self.latent is None:
            queries = width * self.heads * self.head + (self.heads * self.head if self.query_bias else 0)
            return Tensors(queries + out, self.norms, self.format)
        of, each = self.latent, self.latent.nope + self.latent.rope
        down = width * (of.rank + of.rope) + of.rank
        up = of.rank * self.heads * (of.nope + self.value_head)
        if of.query_rank:
            down += width * of.query_rank + of.query_rank
            up += of.query_rank * self.heads * each
        else:
            up += width * self.heads * each
        return Tensors(up + out, down + self.norms, self.format)

    def keys_and_values(self, width: int) -> Tensors:
        """Tensors that are divided by KV heads, and copied where there are more ranks than these."""
        if self.latent is not None:
            return Tensors(format=self.format)
        outputs = self.kv_heads * (self.head + self.value_head)
        return Tensors(width * outputs + (outputs if self.query_bias else 0), 0.0, self.format)

    @property
    def pair_flops(self) -> float:
        """Floating-point operations in prefill for each pair of a token and one that it attends to."""
        return 2.0 * self.heads * (self.head + self.value_head)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """One layer's feed-forward network: dense (`experts` 0), or experts of which `active` see each token.

    `inner` is the width inside, of one expert where there are any; `shared` that of the part every token sees.
    `matrices` is 3 where the activation is gated, else 2.
    """

    inner: int
    matrices: int = 3
    experts: int = 0
    active: int = 0
    shared: int = 0
    bias: bool = False
    shared_gate: bool = False
    format: Format = BF16
    shared_format: Format = BF16

    def dense(self, width: int) -> Tensors:
        """What each token sees, divided by tensor parallelism."""
        inner = self.shared if self.experts else self.inner
        biases = (self.matrices - 1) * inner + width if self.bias and not self.experts else 0
        return Tensors(
            self.matrices * width * inner + biases, 0.0, self.shared_format if self.experts else self.format
        )

    def expert(self, width: int) -> Tensors:
        """One expert."""
        if not self.experts:
            return Tensors(format=self.format)
        biases = (self.matrices - 1) * self.inner + width if self.bias else 0
        return Tensors(self.matrices * width * self.inner + biases, 0.0, self.format)

    def router(self, width: int) -> Tensors:
        """What chooses the experts, whole on every rank."""
        if not self.experts:
            return Tensors()
        bias = self.experts if self.bias else 0
        return Tensors(0.0, width * self.experts + bias + (width if self.shared_gate else 0))


@dataclass(frozen=True, slots=True)
class Layers:
    """So many layers that are alike. `norms` is the number of norms of the model's width in each."""

    count: int
    attention: Attention
    feed_forward: FeedForward
    norms: int = 2


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only language model.

    `layers` are runs of layers in their order. `kv_format` is that of the cache. `beside` are parameters that are no
    layer's and no embedding's: an image encoder. `stored` is what the files of its weights hold together, bytes,
    where they are at hand. `notes` are what a reader of the config must know.
    """

    name: str
    kind: str
    width: int
    vocabulary: int
    layers: tuple[Layers, ...]
    context: int
    tied: bool = False
    kv_format: Format = BF16
    embedding_format: Format = BF16
    head_format: Format = BF16
    beside: Tensors = field(default_factory=Tensors)
    position_embeddings: int = 0
    stored: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def depth(self) -> int:
        """Layers in all."""
        return sum(run.count for run in self.layers)

    def each_layer(self) -> Iterator[Layers]:
        """Layer by layer, each as a run of one."""
        for run in self.layers:
            for _ in range(run.count):
                yield Layers(1, run.attention, run.feed_forward, run.norms)

    @property
    def embedding(self) -> Tensors:
        """The table of input embeddings."""
        return Tensors(self.vocabulary * self.width, self.position_embeddings * self.width, self.embedding_format)

    @property
    def head(self) -> Tensors:
        """The output projection; empty where it is the table of embeddings."""
        return Tensors(0.0 if self.tied else self.vocabulary * self.width, self.width, self.head_format)

    @property
    def parameters(self) -> float:
        """All of them, experts included."""
        return sum(tensors.parameters for tensors in self._tensors())

    @property
    def active_parameters(self) -> float:
        """Those that one token sees, the table of embeddings and what is beside left out (as no product is taken
        with them), the output projection included."""
        layers = sum(run.count * layer_active(run, self.width) for run in self.layers)
        return layers + self.vocabulary * self.width

    @property
    def weight_bytes(self) -> float:
        """Of all parameters, as they are stored; as counted from shapes, not from files."""
        return sum(tensors.bytes for tensors in self._tensors())

    @property
    def weight_scale(self) -> float:
        """What the files hold over what was counted, where they nearly agree: it corrects for what the shapes do not
        show, as scales. Files that differ by more hold something else too, and are not believed."""
        if self.stored is None:
            return 1.0
        scale = self.stored / self.weight_bytes
        return scale if abs(scale - 1.0) <= NEAR else 1.0

    @property
    def experts(self) -> int:
        """The number of routed experts in a layer that has any."""
        return max((run.feed_forward.experts for run in self.layers), default=0)

    @property
    def latent(self) -> bool:
        """Whether its cache is that of MLA, which tensor parallelism cannot divide."""
        return any(run.attention.latent for run in self.layers)

    @property
    def hybrid(self) -> bool:
        """Whether some layers look back without limit and some do not."""
        windows = {bool(run.attention.window) for run in self.layers}
        return len(windows) > 1

    @property
    def kv_bytes_per_token(self) -> float:
        """KV cache of one more token in a context shorter than every window, over all layers and ranks."""
        return sum(run.count * run.attention.kv_values for run in self.layers) * self.kv_format.bytes

    @property
    def kv_bytes_per_token_beyond_windows(self) -> float:
        """The same in a context longer than every window, where windows are made use of."""
        full = (run for run in self.layers if not run.attention.window)
        return sum(run.count * run.attention.kv_values for run in full) * self.kv_format.bytes

    def _tensors(self) -> Iterator[Tensors]:
        yield self.embedding
        yield self.head
        yield self.beside
        for run in self.layers:
            for tensors in layer_tensors(run, self.width):
                yield tensors.times(run.count)


def layer_tensors(run: Layers, width: int) -> Iterator[Tensors]:
    """All tensors of one layer of a run."""
    attention, feed = run.attention, run.feed_forward
    yield attention.queries_and_output(width)
    yield attention.keys_and_values(width)
    yield feed.dense(width)
    yield feed.expert(width).times(feed.experts)
    yield feed.router(width)
    yield Tensors(0.0, run.norms * width)


def layer_active(run: Layers, width: int) -> float:
    """Parameters of one layer that one token is multiplied with."""
    attention, feed = run.attention, run.feed_forward
    return (
        attention.queries_and_output(width).parameters
        + attention.keys_and_values(width).parameters
        + feed.dense(width).parameters
        + feed.active * feed.expert(width).parameters
        + feed.router(width).parameters
    )
