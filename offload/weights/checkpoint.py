"""The reader of checkpoints in safetensors or GGUF: names, shapes and dtypes first, then one tensor at a time into its
destination.

Files are memory-mapped, so a read costs no memory beyond its destination; mapped pages belong to the page cache. Parsed
headers and index take at most 32 bytes of memory per byte in the file. The format itself (offsets in range, no overlap,
no hole, known dtypes) is checked by the safetensors library, and by `config.gguf_header`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError
from torch import Tensor

from offload.config.gguf_header import is_gguf
from offload.config.model import ModelConfig
from offload.config.names import TensorNames
from offload.errors import ModelError, unreadable
from offload.formats.encodings import ENCODINGS
from offload.formats.stored import StoredMatrix
from offload.transfer.direct_file import FileState
from offload.weights.entry import STORED_DTYPES, Entry
from offload.weights.file_rows import FileRows, columns_of_blocks, rows_in_file, table_in_file
from offload.weights.gguf_file import MappedFile, open_model
from offload.weights.linear import numbers
from offload.weights.quantised_folder import gathered
from offload.weights.safetensors_folder import read_entries
from offload.weights.tensors import expected_tensors
from offload.weights.transposed import transposed

# Tensors of old checkpoints that follow from config.json.
COMPUTES_NOTHING = ("*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached")
HEAD, EMBEDDINGS = TensorNames().head, TensorNames().embeddings
_TABLE = EMBEDDINGS.removeprefix(TensorNames().body)
_LAYER_TABLE = ("embed_tokens_per_layer.", "per_layer_model_projection.", "per_layer_projection_norm.")
_BODY_PARTS = ("embed_tokens.", "layers.", "norm.", *_LAYER_TABLE)
_PIECE_BYTES = 64 << 20  # of a tensor that are read at once
_UNPACKED_NUMBERS = 1 << 22  # of a matrix that are unpacked at once
_NUM_NAMED = 3  # tensors of each kind that a message names


class Checkpoint:
    """The tensors of a model folder or GGUF file, by their Hugging Face names. Use as a context manager, or `close` it.

    No method keeps a tensor alive, but for the last matrix that was gathered from several tensors: layers read rows of
    one again and again, as of each head's queries. After `close` only `names`, `files`, `shape` and `dtype` work.
    """

    def __init__(self, folder: Path, entries: Mapping[str, Entry], files: ExitStack) -> None:
        self.folder = folder
        self._entries = dict(entries)
        self._files = files
        self._gathered: tuple[str, Tensor] | None = None

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Map `model.safetensors`, or every shard that `model.safetensors.index.json` names, or a GGUF file with all
        its parts. ModelError."""
        folder = Path(folder)
        with ExitStack() as files:
            try:
                entries = (_read_gguf if is_gguf(folder) else read_entries)(folder, files)
            except OSError as error:
                raise unreadable(folder, error) from error
            except SafetensorError as error:
                raise ModelError(f"{folder} cannot be read ({error}); download it again") from error
            return cls(folder, entries, files.pop_all())

    def names(self) -> tuple[str, ...]:
        """All tensor names, sorted."""
        return tuple(sorted(self._entries))

    def files(self) -> tuple[Path, ...]:
        """The files that the tensors are in, sorted."""
        return tuple(sorted({entry.path for entry in self._entries.values()}))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name`, without the dimension of experts, whose rows follow each other; [channels, taps]
        of a convolution; [heads] of decays. ModelError if there is none of that name."""
        return _in_rows(name, self._entry(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that `name` is stored in; of a matrix in blocks, that of its decoded numbers. ModelError unless it
        is a float of 16, 32 or 64 bits."""
        entry = self._entry(name)
        if self.encoding(name) or entry.unpack:
            return torch.float32
        if entry.dtype not in STORED_DTYPES:
            remedy = "its config.json has no quantization_config that says what they mean"
            raise ModelError(
                f"{entry.path}: {name} is stored as {entry.dtype}, only {', '.join(STORED_DTYPES)} can be read; "
                f"{'fetch the model in another quantisation' if self._is_gguf else remedy}"
            )
        return STORED_DTYPES[entry.dtype]

    def encoding(self, name: str) -> str:
        """The name of the encoding of the matrix `name`, "" if it is stored as plain numbers."""
        dtype = self._entry(name).dtype
        return dtype if dtype in ENCODINGS else ""

    def read_stored(self, name: str, dst: Tensor, *, rows: range | None = None, columns: range | None = None) -> None:
        """Copy the blocks of the matrix `name`, or of some rows and columns of it, to `dst`, uint8 [rows, bytes].
        ModelError for columns that split a block."""
        source = self._blocks(name, rows, columns)
        if source.shape != dst.shape:
            raise ModelError(f"{self.folder}: {name} has rows of {list(source.shape)} bytes, not of {list(dst.shape)}")
        for piece, place in zip(*_in_pieces(source, dst), strict=True):
            place.copy_(piece)
            self._copied(name)

    def mapped_rows(self, name: str) -> Tensor:
        """The rows of the matrix `name` as they lie in the file: [rows, inputs], or uint8 [rows, bytes] in blocks. They
        hold its mapping open, also after `close`. ModelError if they are made as they are read."""
        entry = self._entry(name)
        if entry.unpack or entry.rows or entry.is_gathered:
            raise self._in_one_piece(name)
        return self._mapped(name)

    def rows_in_file(self, name: str, rows: range, columns: range | None = None) -> FileRows | None:
        """The place of rows of a tensor in its file, for those who read them without the mapping; None where only
        `read_into` and `read_stored` can give them. ModelError for columns that split a block."""
        self._check_blocks(name, columns)
        return rows_in_file(self._entry(name), self.shape(name)[0], rows, columns)

    def table_in_file(self, name: str) -> FileRows:
        """The place of the rows of a table, of which single ones are read. ModelError where none can be."""
        entry = self._entry(name)
        self.dtype(name)
        if (found := table_in_file(entry, self.shape(name)[0])) is None:
            raise self._in_one_piece(name)
        return found

    def states(self) -> dict[Path, FileState]:
        """The files, each as it was opened."""
        return {entry.path: entry.state for entry in self._entries.values()}

    def kept(self) -> Checkpoint:
        """This checkpoint for a longer life: closing this one closes nothing any more, and the files stay open until
        the other one is closed."""
        return Checkpoint(self.folder, self._entries, self._files.pop_all())

    def integers(self, name: str) -> Tensor:
        """A tensor of whole numbers, int64. ModelError if there is none of that name, or it has others."""
        entry = self._entry(name)
        found = entry.file.get_tensor(entry.stored_name)
        if found.dtype.is_floating_point or found.dim() != 1:
            raise ModelError(f"{entry.path}: {name} is {entry.dtype} {list(entry.shape)}, not a list of whole numbers")
        return found.long()

    def _in_one_piece(self, name: str) -> ModelError:
        return ModelError(
            f"{self._entry(name).path}: {name} is stored in a format of which no rows can be read alone; fetch the "
            "model in another quantisation"
        )

    def _copied(self, name: str) -> None:
        entry = self._entry(name)
        if isinstance(entry.file, MappedFile):
            entry.file.forget(entry.stored_name)

    def _blocks(self, name: str, rows: range | None, columns: range | None) -> Tensor:
        self._check_blocks(name, columns)
        return columns_of_blocks(self._mapped(name, rows), self.encoding(name), columns)

    def _check_blocks(self, name: str, columns: range | None) -> None:
        """Raise ModelError for columns that split a block."""
        numbers = ENCODINGS[encoding].numbers if (encoding := self.encoding(name)) else 1
        if columns is not None and (columns.start % numbers or columns.stop % numbers):
            raise ModelError(
                f"{self.folder}: {name} is stored in blocks of {numbers} columns, which {columns.start} to "
                f"{columns.stop} would cut; use another number of ranks"
            )

    def read_into(self, name: str, dst: Tensor, *, rows: range | None = None, columns: range | None = None) -> None:
        """Copy tensor `name`, or some rows and columns of it, into `dst` of that shape, with any float dtype, strides
        and device.

        Rounds to dst's dtype; makes no second copy if dst is on the CPU. For a part, only its memory pages are read.
        Blocks until it is done; an interrupt waits for the current piece.
        """
        dst, unpack = torch.atleast_1d(dst), self._entry(name).unpack
        if unpack:
            self._unpack_into(name, dst, rows, columns)
            return
        if stored := self.encoding(name):
            source, kind = self._blocks(name, rows, columns), ENCODINGS[stored]
            shape = [len(source), kind.inputs(source.shape[1])]
        else:
            source = torch.atleast_1d(self._mapped(name, rows))
            if columns is not None:
                source = source[:, columns.start : columns.stop]
            shape = list(source.shape)
        if shape != list(dst.shape):
            raise ModelError(f"{self.folder}: {name} has shape {shape}, {list(dst.shape)} is needed")
        for piece, place in zip(*_in_pieces(source, dst), strict=True):
            place.copy_(numbers(StoredMatrix(piece.contiguous(), kind), dst.dtype) if stored else piece)
            self._copied(name)

    def _unpack_into(self, name: str, dst: Tensor, rows: range | None, columns: range | None) -> None:
        entry, source, shape = self._entry(name), self._mapped(name), self.shape(name)
        rows, columns = rows or range(shape[0]), columns or range(shape[1])
        if (len(rows), len(columns)) != tuple(dst.shape):
            raise ModelError(f"{self.folder}: {name} has shape {list(shape)}, {list(dst.shape)} is needed")
        assert entry.unpack is not None
        step = max(1, _UNPACKED_NUMBERS // shape[1])
        for first in range(0, len(rows), step):
            piece = source[_slice(rows[first : first + step])]
            dst[first : first + step].copy_(entry.unpack(piece)[:, columns.start : columns.stop])
            self._copied(name)

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors: stored name -> the name used from now on."""
        self._entries = {names.get(name, name): entry for name, entry in self._entries.items()}

    def by_outputs(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Read stacks [experts, inputs, outputs] of plain numbers by outputs from now on. A stack of other than square
        matrices that is by outputs already stays: transformers 5 writes such. shapes: of the rows of all experts."""
        for name, (_, inputs) in shapes.items():
            entry = self._entries.get(name)
            if entry is None or len(entry.shape) != 3 or entry.dtype not in STORED_DTYPES:
                continue
            if entry.shape[2] != inputs or entry.shape[1] == inputs:
                self._entries[name] = transposed(entry)

    def gather(self, config: ModelConfig) -> None:
        """Combine the tensors of each quantised matrix into one entry. Names are the ones after `rename`.
        ModelError."""
        self._entries = gathered(self._entries, config, self.folder)

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors hold the same values in the same shape."""
        same = self.shape(first) == self.shape(second)
        return same and torch.equal(self._mapped(first), self._mapped(second))

    def check(
        self, expected: Mapping[str, tuple[int, ...]], *, ignore: Sequence[str] = (), beside: Set[str] = frozenset()
    ) -> None:
        """ModelError unless the checkpoint holds exactly `expected` (name -> shape), in dtypes that can be read.

        Further tensors are allowed if their name matches a pattern of `ignore` (`*.rotary_emb.inv_freq`) or is in
        `beside`.
        """
        missing = sorted(expected.keys() - self._entries.keys())
        further = self._entries.keys() - expected.keys() - beside
        unexpected = sorted(name for name in further if not any(fnmatchcase(name, pattern) for pattern in ignore))
        misshapen = [
            f"{name} {list(self.shape(name))}, not {list(shape)}"
            for name, shape in sorted(expected.items())
            if name in self._entries and self.shape(name) != tuple(shape)
        ]
        found = {"missing": missing, "unexpected": unexpected, "of the wrong shape": misshapen}
        if any(found.values()):
            problems = "; ".join(f"{len(names)} {what} ({_first(names)})" for what, names in found.items() if names)
            raise ModelError(
                f"{self.folder}: the tensors do not fit {self._description}: {problems}; "
                f"{_remedy(missing, unexpected, self._is_gguf)}"
            )
        for name in expected:
            self.dtype(name)

    def close(self) -> None:
        """Unmap all files. Idempotent."""
        self._gathered = None
        self._files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _is_gguf(self) -> bool:
        return is_gguf(self.folder)

    @property
    def _description(self) -> str:
        """The file that lists the tensors, for messages."""
        return "the file's metadata" if self._is_gguf else "config.json"

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise ModelError(f"{self.folder} holds no tensor {name}; {self._description} may be another model's")
        return self._entries[name]

    def _mapped(self, name: str, rows: range | None = None) -> Tensor:
        """A view of the mapped file, or of some rows; it must not be kept, since it holds the mapping open."""
        entry = self._entry(name)
        self.dtype(name)
        try:
            if rows is not None and entry.rows is not None:
                return entry.rows(rows)
            tensor = self._gathered_once(name, entry) if entry.is_gathered else entry.file.get_tensor(entry.stored_name)
        except SafetensorError as error:
            raise ModelError(f"{entry.path}: {name} cannot be read ({error})") from error
        tensor = tensor.view(_in_rows(name, tuple(tensor.shape)))
        return tensor if rows is None else tensor[_slice(rows)]

    def _gathered_once(self, name: str, entry: Entry) -> Tensor:
        if self._gathered is None or self._gathered[0] != name:
            self._gathered = None  # two of them need not be there at once
            self._gathered = name, entry.file.get_tensor(entry.stored_name)
        return self._gathered[1]


def _in_rows(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor as rows one below the other. Of four dimensions two or three are 1: of taps or of
    decays."""
    if len(shape) == 4:
        rows = math.prod(shape[:3])
        return (rows, shape[3]) if shape[3] > 1 else (rows,)
    return (shape[0] * shape[1], *shape[2:]) if _is_stack(name, len(shape)) else shape


def _is_stack(name: str, num_dims: int) -> bool:
    """Whether the tensor `name` has a leading dimension, of experts, of one for each channel of a convolution, or of
    one for the biases of all experts."""
    return num_dims == (2 if name.endswith((".bias", "_correction_bias")) else 3)


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop, rows.step)


def _in_pieces(source: Tensor, dst: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Source and destination in pieces of the same rows, of _PIECE_BYTES each."""
    num_rows = max(1, _PIECE_BYTES * len(source) // max(source.nbytes, 1))
    return source.split(num_rows), dst.split(num_rows)


def check_model(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raises ModelError unless `checkpoint` holds exactly the weights of `config`, which then have the names of
    `expected_tensors`. As in transformers, names of a base model may lack the prefix "model.", tied embeddings may be
    stored as the head alone, and tensors outside body and head (a trainer's value head, an image encoder) are ignored.

    With tied embeddings a head is ignored only if it equals the embeddings: if they differ, transformers 5 unties them
    and version 4 does not, so such a folder is ambiguous. Comparing reads both once.
    """
    expected = expected_tensors(config)
    checkpoint.rename(_other_names(checkpoint.names(), config))
    _join_parts(checkpoint, config, expected)
    names = checkpoint.names()
    head, embeddings = config.names.head, config.names.embeddings
    is_whole = expected.keys() <= set(names)  # otherwise the unexpected tensors may explain the fault
    beside = {name for name in names if is_whole and not name.startswith((config.names.body, "lm_head."))}
    tied_head = (head,) if config.tie_embeddings else ()
    unused = (f"{config.names.body}{pattern}" for pattern in config.names.unused)
    checkpoint.check(expected, ignore=(*COMPUTES_NOTHING, *tied_head, *unused), beside=beside)
    if tied_head and head in names and not checkpoint.equal(head, embeddings):
        raise ModelError(
            f"{checkpoint.folder}: tie_word_embeddings is true, but {head} differs from {embeddings}; "
            "set it to false in config.json if the model has its own head"
        )


def check_head(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raises ModelError unless `checkpoint` holds the weights of a next-token head, of this config, which then have the
    names of `expected_tensors`."""
    expected = expected_tensors(config)
    try:
        _join_parts(checkpoint, config, expected)
        checkpoint.check(expected, beside=set(checkpoint.names()))
    except ModelError as error:
        raise ModelError(f"{error}; --draft none does without this next-token head") from error


def _join_parts(checkpoint: Checkpoint, config: ModelConfig, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Give matrices without a suffix theirs, and join the parts of quantised ones. expected: the names from then on,
    with shapes."""
    checkpoint.rename(_bare_names(checkpoint.names(), expected))
    if config.names.experts.by_inputs:
        stacks = {name: shape for name, shape in expected.items() if ".experts." in name and name.endswith(".weight")}
        checkpoint.by_outputs(stacks)
    if config.quantisation is not None:
        checkpoint.gather(config)


def _other_names(names: Sequence[str], config: ModelConfig) -> dict[str, str]:
    """The map from stored to expected names, for tensors that are stored under another name."""
    found, expected = {name: name for name in names}, config.names
    wrapped = expected.body.removeprefix("model.") if expected.body.startswith("model.") else ""
    if wrapped:  # older checkpoints wrap the language model with its head
        inner, head = f"{wrapped}model.", f"{wrapped}{expected.head}"
        bare = tuple(f"{wrapped}{part}" for part in _BODY_PARTS)
        found |= {name: expected.body + name.removeprefix(inner) for name in names if name.startswith(inner)}
        found |= {name: f"model.{name}" for name in names if name.startswith(bare)}
        found |= {head: expected.head} if head in found else {}
    for prefix in ("", "model."):  # of a body by itself, and of one that an encoder was put beside
        if expected.embeddings not in found.values() and f"{prefix}{_TABLE}" in found:
            own = tuple(f"{prefix}{part}" for part in _BODY_PARTS)
            found |= {name: expected.body + name.removeprefix(prefix) for name in names if name.startswith(own)}
    if config.tie_embeddings and expected.head in found and expected.embeddings not in found.values():
        found[expected.head] = expected.embeddings
    return {name: meant for name, meant in found.items() if name != meant}


def _bare_names(names: Sequence[str], expected: Collection[str]) -> dict[str, str]:
    """The map from stored to expected names for matrices that are stored without the suffix ".weight", and biases with
    the suffix "_bias", as those of all experts are."""
    missing = set(expected).difference(names)
    wanted = {name.removesuffix(".weight"): name for name in missing if name.endswith(".weight")}
    wanted |= {f"{name.removesuffix('.bias')}_bias": name for name in missing if name.endswith(".bias")}
    return {name: wanted[name] for name in names if name in wanted}


def _remedy(missing: Sequence[str], unexpected: Sequence[str], in_gguf: bool) -> str:
    if in_gguf:
        if unexpected and not missing:
            return "the model has parts that this program does not know"
        return "download it again, or fetch the model in another file"
    if missing == [HEAD]:
        return "set tie_word_embeddings to true if the model's embeddings are its head, or fetch the one with a head"
    if any(name.endswith((".qweight", ".weight_packed", ".weight_scale", "_blocks")) for name in unexpected):
        return (
            "the weights are quantised, and config.json has no quantization_config that says how; fetch it again, or "
            "copy what quantize_config.json says into it, with its quant_method"
        )
    what = "of a model with parts that this program does not know" if unexpected and not missing else "another model's"
    return f"the weights or config.json are {what}; fetch both together, of one version of a supported model"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")


def _read_gguf(path: Path, files: ExitStack) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for name, entry in open_model(path, files):
        if name in entries:
            raise ModelError(f"{entry.path}: {entry.stored_name} is there under two names; download it again")
        entries[name] = entry
    return entries
