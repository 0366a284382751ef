"""A model from the hub into the folder of models: first what says whether it can be used, then its weights.

All is fetched into OWNER/NAME/.pull, pickled shards are converted there one by one, and when everything is there it
changes places. A pull that is broken off leaves .pull lying, and the next one goes on from there. Only files that an
earlier pull put into OWNER/NAME are ever removed from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ModelError
from offload.hub import choice, remote
from offload.hub.disk import check_room
from offload.hub.fetch import fetch, is_whole, partial_path
from offload.hub.library import MOVING, STAGING, Origin
from offload.hub.names import FOLDER_VARIABLE, model_folder
from offload.hub.pickles import convert_shard, source_of, weight_map
from offload.hub.remote import Listing, RemoteFile
from offload.plan.config import ModelConfig
from offload.plan.files import write_whole
from offload.transfer.checkpoint import INDEX_FILE, Checkpoint, check_model

Report = Callable[[str, int, int], None]  # stage, bytes done, bytes in all
_LOCK = "lock"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a pull is about to do. files: all of the model's; missing_bytes: what is not here yet of them."""

    listing: Listing
    folder: Path
    files: tuple[RemoteFile, ...]
    missing_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def converts(self) -> bool:
        return any(choice.is_pickled(file.name) for file in self.files)


def pull(
    repository: str, revision: str, *, config_only: bool, on_offer: Callable[[Offer], None], report: Report
) -> Offer:
    """Make OWNER/NAME what the hub has at `revision`; only what differs is fetched. `on_offer` hears what will be
    before the weights come.

    Memory: little; where shards in torch's old format are converted, as much as one. Raises TriforceError of several
    kinds.
    """
    listing = remote.ask(repository, revision)
    folder = model_folder(listing.repository)
    with remote.refusals(repository, revision, folder), _staging(folder) as staging:
        transfer = _Transfer(listing, folder, staging, report)
        offer = transfer.prepare(config_only=config_only)
        on_offer(offer)
        transfer.fetch_all(offer.missing_bytes)
        transfer.settle(config_only=config_only)
    if not config_only:
        with Checkpoint.open(folder) as checkpoint:
            check_model(checkpoint, ModelConfig.from_folder(folder))
    return offer


class _Transfer:
    """One pull under way. A file of the model is in `staging` where it has been fetched now, else in `folder`."""

    def __init__(self, listing: Listing, folder: Path, staging: Path, report: Report) -> None:
        self._listing, self._folder, self._staging, self._report = listing, folder, staging, report
        self._files: list[RemoteFile] = []
        self._missing: list[RemoteFile] = []
        self._waiting: set[RemoteFile] = set()  # missing ones that are fetched and not yet converted

    def prepare(self, *, config_only: bool) -> Offer:
        """Find out what is to be fetched, from config.json and the index, which are."""
        beginnings = choice.beginnings(self._listing, config_only=config_only)
        for file in beginnings:
            if not is_whole(self._staging / file.name, file, count=_ignore):
                self._fetch(file, _ignore)
        self._check_config()
        self._files = choice.chosen(self._listing, self._staging, config_only=config_only)
        self._look([file for file in self._files if file not in beginnings])
        num_bytes = sum(file.num_bytes - self._num_come(file) for file in self._missing)
        return Offer(listing=self._listing, folder=self._folder, files=tuple(self._files), missing_bytes=num_bytes)

    def fetch_all(self, total: int) -> None:
        """Fetch what is missing, `total` bytes, and convert what is pickled as it comes."""
        self._check_room(total)
        done = 0
        if total:
            self._report("fetch", 0, total)

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            self._report("fetch", min(done, total), total)

        for file in self._missing:
            if file not in self._waiting:
                self._fetch(file, count)
            if choice.is_pickled(file.name):
                self._convert(file)

    def settle(self, *, config_only: bool) -> None:
        """Put everything in its place, and remove what an earlier pull put there and this one does not. Weights stay
        where only the config is pulled, and so does what has come of them."""
        names = self._final_names()
        before = Origin.read(self._folder)
        old = set(before.files if before else ())
        moving = self._staging / MOVING
        moving.touch()
        for name in sorted(names):
            if (self._staging / name).exists():
                os.replace(self._staging / name, self._folder / name)
        if config_only:
            names |= old
        for name in old - names:
            (self._folder / Path(name).name).unlink(missing_ok=True)
        source, commit, license_ = self._listing.repository, self._listing.commit, self._listing.license
        Origin(source=source, commit=commit, license=license_, files=tuple(sorted(names))).write(self._folder)
        moving.unlink()
        if not config_only:
            shutil.rmtree(self._staging)

    def _final_names(self) -> set[str]:
        """What the model's files are called in the end; the index of converted ones is written."""
        names = {self._kept_name(file) for file in self._files if file.name != choice.BIN_INDEX_FILE}
        made = sorted({self._kept_name(file) for file in self._files if choice.is_pickled(file.name)})
        if len(made) < 2:
            return names
        write_index(self._staging, [self._where(name) for name in made])
        return names | {INDEX_FILE}

    def _fetch(self, file: RemoteFile, count: Callable[[int], None]) -> None:
        fetch(remote.address(self._listing, file), file, self._staging, count=count)

    def _convert(self, file: RemoteFile) -> None:
        self._report("convert", 0, file.num_bytes)
        shard, tied = self._staging / file.name, ModelConfig.from_folder(self._staging).tie_embeddings
        convert_shard(shard, self._staging / self._kept_name(file), source=file.digest, tied=tied)
        shard.unlink()
        self._report("convert", file.num_bytes, file.num_bytes)

    def _check_config(self) -> None:
        """A model that cannot be run is refused before its weights are fetched; nothing of it is kept."""
        try:
            ModelConfig.from_folder(self._staging)
        except ModelError as error:
            shutil.rmtree(self._staging)
            raise ModelError(f"{self._listing.repository} was not pulled: {error}") from error

    def _look(self, files: Sequence[RemoteFile]) -> None:
        """Which of `files` are neither staged nor in place, by their bytes. Of other versions nothing stays staged."""
        places = [where / file.name for where in (self._staging, self._folder) for file in files]
        total = sum(path.stat().st_size for path in places if path.is_file())
        done = 0

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            self._report("check", min(done, total), total)

        for file in files:
            staged = is_whole(self._staging / file.name, file, count=count)
            if not staged:
                (self._staging / file.name).unlink(missing_ok=True)  # another version's
            if choice.is_pickled(file.name):
                here = self._is_converted(file)
            else:
                here = staged or is_whole(self._folder / file.name, file, count=count)
            if not here:
                self._missing.append(file)
                self._waiting |= {file} if staged else set()

    def _is_converted(self, file: RemoteFile) -> bool:
        name = self._kept_name(file)
        if source_of(self._staging / name) == file.digest:
            return True
        (self._staging / name).unlink(missing_ok=True)
        return source_of(self._folder / name) == file.digest

    def _num_come(self, file: RemoteFile) -> int:
        """Bytes that have come of a missing file."""
        partial = partial_path(file, self._staging)
        if file in self._waiting:
            return file.num_bytes
        return min(partial.stat().st_size, file.num_bytes) if partial.is_file() else 0

    def _check_room(self, num_bytes: int) -> None:
        """A pickled shard lies beside what is made of it until that is verified."""
        shards = [file.num_bytes for file in self._missing if choice.is_pickled(file.name)]
        remedy = f"name a folder on another disk with {FOLDER_VARIABLE}"
        check_room(self._folder, num_bytes + max(shards, default=0), remedy)

    def _kept_name(self, file: RemoteFile) -> str:
        """The name that a file has in the end."""
        if not choice.is_pickled(file.name):
            return file.name
        names = sorted(other.name for other in self._files if choice.is_pickled(other.name))
        return choice.converted_name(file.name, names)

    def _where(self, name: str) -> Path:
        return self._staging / name if (self._staging / name).exists() else self._folder / name


def write_index(folder: Path, paths: Sequence[Path]) -> None:
    """The index of safetensors files, as transformers writes it. Raises ModelError, OSError."""
    total = sum(path.stat().st_size for path in paths)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map(paths).items()))}
    write_whole(folder / INDEX_FILE, json.dumps(index, indent=1) + "\n")


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """The folder that files are fetched into, ours alone meanwhile. It stays where the pull does not come to its end,
    unless nothing is in it."""
    staging = folder / STAGING
    staging.mkdir(parents=True, exist_ok=True)
    with (staging / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ModelError(f"another process is pulling into {folder}; wait until it is done") from error
        try:
            yield staging
        finally:
            _remove_empty(folder, staging)


def _remove_empty(folder: Path, staging: Path) -> None:
    for partial in staging.glob("*.part"):
        if not partial.stat().st_size:
            partial.unlink()
    if staging.exists() and os.listdir(staging) == [_LOCK]:
        shutil.rmtree(staging)
    if not staging.exists():
        with contextlib.suppress(OSError):  # not empty, as a rule
            folder.rmdir()
            folder.parent.rmdir()


def _ignore(num_bytes: int) -> None:
    return None
