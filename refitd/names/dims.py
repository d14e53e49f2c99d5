"""The sizes of a decoder, by which tables of names give shapes. Pure data; it knows no framework and no family."""

from __future__ import annotations

from dataclasses import dataclass

from refitd.domain.errors import Invalid


@dataclass(frozen=True, slots=True)
class ModelDims:
    """Sizes of a decoder. `vocab` is the Hugging Face vocabulary, without the rows that Megatron pads.

    With `experts`, the MLP of every layer outside `dense_layers` is a mixture of so many, `expert_ffn` wide, with
    shared experts of together `shared_ffn` (0: none); `router_bias` says that routers hold one bias per expert, which
    load balancing moves (also in steps that the optimizer skips). With `kv_lora` attention is multi-latent: `q_lora`
    (0: queries are not compressed), `nope_dim` and `rope_dim` per query head, `v_dim` per value head. `mtp_layers`
    follow the decoder's `layers` and are numbered on from them.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 0
    expert_ffn: int = 0
    router_bias: bool = False
    shared_ffn: int = 0
    dense_layers: tuple[int, ...] = ()
    q_lora: int = 0
    kv_lora: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    v_dim: int = 0
    mtp_layers: int = 0

    def __post_init__(self) -> None:
        sizes = ["layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"]
        sizes += ["expert_ffn"] if self.experts else []
        sizes += ["nope_dim", "rope_dim", "v_dim"] if self.kv_lora else []
        for name in sizes:
            if getattr(self, name) < 1:
                raise Invalid(
                    f"{name} must be positive, it is {getattr(self, name)}", advice="check the model's config"
                )
        if self.heads % self.kv_heads:
            raise Invalid(
                f"{self.heads} attention heads are no multiple of {self.kv_heads} KV heads",
                advice="check num_attention_heads and num_query_groups",
            )

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has a plain MLP. MTP layers are built as the decoder's last one."""
        return not self.experts or min(layer, self.layers - 1) in self.dense_layers

    @property
    def query(self) -> int:
        """Rows of q_proj."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Rows of k_proj, and of v_proj."""
        return self.kv_heads * self.head_dim

    @property
    def latent_query(self) -> int:
        """Rows of q_b_proj, or of q_proj where queries are not compressed."""
        return self.heads * (self.nope_dim + self.rope_dim)

    @property
    def latent_key_value(self) -> int:
        """Rows of kv_b_proj."""
        return self.heads * (self.nope_dim + self.v_dim)

    @property
    def latent_down(self) -> int:
        """Rows of kv_a_proj_with_mqa."""
        return self.kv_lora + self.rope_dim

    @property
    def latent_value(self) -> int:
        """Columns of o_proj behind multi-latent attention."""
        return self.heads * self.v_dim

    @property
    def plain_query(self) -> bool:
        return not self.q_lora

    @property
    def twice_hidden(self) -> int:
        return 2 * self.hidden
