"""What the authors' code calls the parameters of our modules."""

from typing import Any

from flaxmix import mixers, models

# Each table translates one part of a path; "a.b" translates b below a, and goes first.
# An empty name is left out.

_LEAVES = {"kernel": "weight", "scale": "weight"}

_SHELL = _LEAVES | {
    "embed": "in_proj",
    "mixer_norm": "norm1",
    "mlp_norm": "norm2",
    "mlp": "ffn",
    "norm": "out_proj.0",
    "head": "out_proj.1",
    "first": "fc1",
    "hidden": "fcs",
    "last": "fc2",
}
_FLARE = _SHELL | {
    "latents": "latent_q",
    "seeds": "latent_q0",
    "reference": "latent_q_fixed",
    "gate": "gate_logit",
    "seed_norm": "q0_norm",
    "synthesis_norm": "k0_norm",
    "synthesis_key_norm": "k0_norm",
    "synthesis_value_norm": "v0_norm",
    "reference_norm": "q_fixed_norm",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
    "synthesis_key": "k0_proj",
    "synthesis_value": "v0_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "out_proj",
    "qkv": "qkv_proj",
}
_ORIGINAL = _FLARE | {"mixer": "att", "mlp": "mlp"}
_TRANSOLVER = _SHELL | {
    "point": "in_project_x",
    "feature": "in_project_fx",
    "project": "in_project",
    "slice": "in_project_slice",
    "query": "to_q",
    "key": "to_k",
    "value": "to_v",
    "out": "to_out.0",
    "temperature_head": "proj_temperature",
    "temperature_head.first": "0",
    "temperature_head.last": "2",
    "offset": "bias",
}
_LUNA = _SHELL | {
    "mixer": "att",
    "mlp": "mlp",
    "packed": "packed_embed",
    "packed_norm": "norm_p",
    "pack_query": "pq_proj",
    "pack_key": "pk_proj",
    "pack_value": "pv_proj",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "out_proj",
}
_ANCHORS = _SHELL | {"mixer": "attn", "mlp": "mlp", "out": "proj"}
_SET_TRANSFORMER = _SHELL | {
    "mixer": "attn",
    "inducing": "I",
    "induce": "mab0",
    "read": "mab1",
    "query": "fc_q",
    "key": "fc_k",
    "value": "fc_v",
    "out": "fc_o",
    "attention_norm": "ln0",
    "output_norm": "ln1",
}
_PERCEIVER = _FLARE | {
    "mixer": "att",
    "mlp": "mlp",
    "mixer_norm": "ln1",
    "mlp_norm": "ln2",
    "latent_norm": "ln1",
    "point_norm": "ln2",
    "encoder.norm": "ln",
    "query": "q_proj",
    "norm": "out_proj.ln",
    "head": "out_proj.mlp",
}
_LNO = _LEAVES | {
    "trunk": "trunk_projector",
    "branch": "branch_projector",
    "score": "attention_projector",
    "head": "out_mlp",
    "first": "input",
    "last": "output",
    "blocks": "attn_blocks",
    "mixer": "self_attn",
    "mixer_norm": "ln1",
    "mlp_norm": "ln2",
    "mlp.first": "0",
    "mlp.last": "2",
    "query": "Wq",
    "key": "Wk",
    "value": "Wv",
    "out": "proj",
}
_GNOT = _LEAVES | {
    "geometry": "preprocess_x",
    "field": "preprocess_z",
    "first": "linear_pre.0",
    "last": "linear_post",
    "geometry_norm": "ln1",
    "field_norm": "ln2",
    "cross": "crossattn",
    "cross_norm": "ln3",
    "self_norm": "ln4",
    "attend": "selfattn",
    "output_norm": "ln5",
    "out": "proj",
    "experts1": "moe_mlp1",
    "experts2": "moe_mlp2",
    "experts1.first": "0",
    "experts1.last": "2",
    "experts2.first": "0",
    "experts2.last": "2",
    "gate": "gatenet",
    "gate.first": "0",
    "gate.hidden": "2",
    "hidden.0": "",
    "gate.last": "4",
    "head": "",
    "head.first": "fc1",
    "head.last": "fc2",
}

_TABLES: dict[type, dict[str, str]] = {
    mixers.SelfAttention: _FLARE,
    mixers.Flare: _FLARE,
    mixers.FlarePP: _FLARE,
    mixers.SimplifiedFlarePP: _FLARE,
    mixers.AblatedFlarePP: _FLARE,
    mixers.OriginalFlare: _ORIGINAL,
    mixers.Transolver: _TRANSOLVER,
    mixers.TransolverPP: _TRANSOLVER,
    mixers.Transolver3: _TRANSOLVER | {"out": "to_out_linear"},
    mixers.AnchorAttention: _ANCHORS,
    models.LunaBlock: _LUNA,
    models.Luna: _LUNA,
    models.ABUPT: _ANCHORS,
    models.SetTransformer: _SET_TRANSFORMER,
    models.PerceiverIO: _PERCEIVER,
    models.LNO: _LNO,
    models.GNOT: _GNOT,
}


def table(module: Any) -> dict[str, str]:
    """Names of a module's parts.

    Raises:
        ValueError: if the module has no counterpart.
    """
    kind = type(module)
    if kind is models.Surrogate:
        kind = type(module.blocks.mixer)
    if kind not in _TABLES:
        raise ValueError(f"{kind.__name__} has no counterpart in the authors' code.")
    return _TABLES[kind]


def prefix(module: Any) -> list[str]:
    """What stands before the names of a mixer by itself."""
    if isinstance(module, mixers.OriginalFlare | mixers.AnchorAttention):
        return [table(module)["mixer"]]
    return []
