"""What the hub says of a repository, and its refusals in words that say what to run.

huggingface_hub is imported inside functions only: nothing but a pull needs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import quote

from offload.errors import ModelError, TriforceError
from offload.hub.disk import disk_error
from offload.hub.names import is_id, models_folder, pull_command

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

ANSWER_SECONDS = 30.0
_LICENSE = re.compile(r"license:([\w.+-]{1,64})", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository. digest: hexadecimal sha256 where it is stored as a large file, else git's sha1 of it."""

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True)
class Listing:
    """A repository at one commit. license: as the hub names it, "" where it names none."""

    repository: str
    revision: str
    commit: str
    license: str
    files: tuple[RemoteFile, ...]

    def file(self, name: str) -> RemoteFile | None:
        return next((file for file in self.files if file.name == name), None)


def ask(repository: str, revision: str) -> Listing:
    """What the hub has of `repository` at `revision`. Raises ModelError, TriforceError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    with refusals(repository, revision):
        try:
            info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=ANSWER_SECONDS)
        except HfHubHTTPError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise TriforceError(f"the hub's answer cannot be read ({error}); is HF_ENDPOINT a hub?") from error
    commit, name = str(info.sha), str(info.id)
    if not is_id(name) or not _COMMIT.fullmatch(commit):
        raise ModelError(f"the hub answers with {name!r} at {commit!r} for {repository}; is HF_ENDPOINT a hub?")
    if name.lower() != repository.lower():  # renamed there; here it is found under the name that was asked for
        name = repository
    return Listing(name, revision, commit, _license(info), tuple(map(_file, info.siblings or ())))


def address(listing: Listing, file: RemoteFile) -> str:
    """Where the bytes of `file` are, at the listing's commit whatever is pushed meanwhile."""
    from huggingface_hub import HfApi

    return f"{HfApi().endpoint}/{listing.repository}/resolve/{listing.commit}/{quote(file.name)}"


@contextmanager
def refusals(repository: str, revision: str, folder: Path | None = None) -> Iterator[None]:
    """Errors of huggingface_hub, of the network and of the disk `folder`, as errors that say what to run."""
    from huggingface_hub import errors

    again = pull_command(repository, revision)
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise ModelError(
            f"HF_HUB_OFFLINE is set, so {repository} cannot be pulled; unset it and run {again}"
        ) from error
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repository} is gated: accept its terms at https://huggingface.co/{repository}, log in with "
            f"'hf auth login', then run {again}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{repository} has no revision {revision!r}; {pull_command(repository)} takes main") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub shows no repository {repository}: look at the spelling; if it is private, log in with "
            f"'hf auth login' and run {again}"
        ) from error
    except errors.HfHubHTTPError as error:
        _answered(repository, error.response.status_code, again, error)
    except transport_error() as error:
        raise TriforceError(
            f"the hub cannot be reached ({type(error).__name__}: {error}); look at the network, then {again} goes on "
            "from where it was"
        ) from error
    except OSError as error:
        raise disk_error(error, folder or models_folder(), f"{again} goes on from where it was") from error


def transport_error() -> type[Exception]:
    """The root of all errors of the library that carries requests, whichever that is."""
    from huggingface_hub.errors import HfHubHTTPError

    root: type[Exception] = HfHubHTTPError.__bases__[0]
    return root


def _answered(repository: str, status: int, again: str, error: Exception) -> NoReturn:
    if status in (401, 403):
        raise ModelError(
            f"the hub refuses {repository} to you (status {status}): log in with 'hf auth login', as somebody who may "
            f"read it, then run {again}"
        ) from error
    if status == 404:
        raise ModelError(f"a file of {repository} is gone from the hub; {again} asks anew what there is") from error
    raise TriforceError(f"the hub answered with status {status}; later {again} goes on from where it was") from error


def _license(info: ModelInfo) -> str:
    found = (_LICENSE.fullmatch(tag) for tag in info.tags or ())
    return next((match[1] for match in found if match), "")


def _file(sibling: RepoSibling) -> RemoteFile:
    digest = str(sibling.lfs.sha256 if sibling.lfs else sibling.blob_id)
    if type(sibling.size) is not int or sibling.size < 0 or not _DIGEST.fullmatch(digest):
        raise ModelError(f"the hub does not say how long {sibling.rfilename!r} is and what it hashes to; try later")
    return RemoteFile(sibling.rfilename, sibling.size, digest)
