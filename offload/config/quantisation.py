"""The encodings of a model's matrices from config.json's quantization_config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

from offload.config.encodings import encoded, matrices
from offload.config.model import ModelConfig
from offload.config.modelopt import SCALE, TENSOR_SCALE, as_stored
from offload.config.next_token import head_of
from offload.config.quantisers import read_quantisation
from offload.config.schemes import Quantisation, Rule, Scheme
from offload.errors import ModelError
from offload.fields import Fields
from offload.units import size as in_units

TEXT_CONFIG = "text_config"  # of a wrapper: the language model's own
KEYS = ("quantization_config", "compression_config")  # of config.json; the second is an old one


def parted(data: Mapping[str, object], where: str) -> tuple[Mapping[str, object], Fields | None]:
    """A config without its quantization_config, and that field; in a wrapper, the inner config may have it."""
    text = data.get(TEXT_CONFIG)
    inner = text if isinstance(text, Mapping) else {}
    whole = Fields(data, where)
    holders = (whole, whole.inner(TEXT_CONFIG, inner))
    given = [holder.inner(key) for holder in holders for key in KEYS if holder.data.get(key) is not None]
    plain = {key: value for key, value in data.items() if key not in KEYS}
    if inner:
        plain[TEXT_CONFIG] = {key: value for key, value in inner.items() if key not in KEYS}
    if not given:
        return plain, None
    if any(other.data != given[0].data for other in given):
        raise ModelError(f"{where}: quantization_config is there twice and differs; remove the one that is not true")
    return plain, given[0]


def quantised(config: ModelConfig, source: Fields, scales: str = "", scaled: Set[str] | None = None) -> ModelConfig:
    """`config` with the encodings that `source`, its quantization_config, describes. scales: their dtype if it is
    known. scaled: the names of all scales; None if they are not known. ModelError."""
    found = _with_scales(read_quantisation(source, config.dtype), scales)
    head = head_of(config)
    stored = matrices(config) | (matrices(head) if head is not None else {})
    schemes = {name: scheme_of(name, found, config) for name in stored}
    if found.by_tensors and scaled is not None:
        schemes = {name: as_stored(scheme, _scale_of(name, config, scaled)) for name, scheme in schemes.items()}
        found = replace(found, named={name.removesuffix(".weight"): scheme for name, scheme in schemes.items()})

    def encoding_of(name: str) -> str:
        scheme = schemes[name]
        return "" if scheme is None else scheme.encoding(stored[name].inputs)

    opened = [name for name, scheme in schemes.items() if scheme is not None and not encoding_of(name)]
    if opened:
        num_bytes = sum(2 * stored[name].outputs * stored[name].inputs for name in opened)
        remark = (
            f"{len(opened)} quantised matrices are kept as plain numbers, {in_units(num_bytes)} in 16 bits: the order "
            "or size of their groups, the size of their rows, or the dtype of their scales, fits no block"
        )
        found = replace(found, remarks=(*found.remarks, remark))
    return replace(encoded(config, encoding_of), quantisation=found)


def _with_scales(found: Quantisation, scales: str) -> Quantisation:
    """`found` with scales of that dtype, except for schemes that are read as fp32."""

    def change(rule: Rule) -> Rule:
        if rule.scheme is None or rule.scheme.widens or rule.scheme.is_e2m1 or not scales:
            return rule
        return replace(rule, scheme=replace(rule.scheme, scales=scales))

    return replace(found, rules=tuple(map(change, found.rules)))


def scheme_of(name: str, quantisation: Quantisation, config: ModelConfig) -> Scheme | None:
    """The scheme of the matrix `name`, as named in `expected_tensors`; None for plain numbers."""
    modules, own = _modules(name, config), config.names
    kind = "Embedding" if len(modules) > 1 or name in (own.embeddings, own.layer_table) else "Linear"
    return quantisation.scheme([alias for module in modules for alias in _aliases(module, own.body)], kind)


def _scale_of(name: str, config: ModelConfig, scaled: Set[str]) -> str:
    """The scale that the tensors of the matrix `name` have, "" for none."""
    modules, body = _modules(name, config), config.names.body
    aliases = [alias for each in modules for alias in (*_aliases(each, body), each.removeprefix(body))]
    for part in (TENSOR_SCALE, SCALE, f"{SCALE}_inv"):
        if any(f"{alias}.{part}" in scaled for alias in aliases):
            return part
    return ""


def _modules(name: str, config: ModelConfig) -> list[str]:
    """The module of the matrix `name`, and of a part of a table the table's."""
    module = name.removesuffix(".weight")
    return [*filter(None, (module, config.names.ngrams.whole_table(module)))]


def _aliases(module: str, body: str) -> Iterator[str]:
    """The names of a module in checkpoints of several ages."""
    yield module
    wrapped = body.removeprefix("model.").removesuffix(".")
    if wrapped and module.startswith(body):
        yield f"{wrapped}.model.{module.removeprefix(body)}"
        yield f"model.{module.removeprefix(body)}"
    elif wrapped:
        yield f"{wrapped}.{module}"
