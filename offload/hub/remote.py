"""The hub's listing of a repository, and its errors translated into messages that name the command to run.

huggingface_hub is imported inside functions, because only `triforce pull` needs it.
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
from offload.interrupts import waiting

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

ANSWER_SECONDS = 30.0
_LICENSE = re.compile(r"license:([\w.+-]{1,64})", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository. digest: hexadecimal sha256 of a large file, git's sha1 of any other. path: its place in
    the repository, where it is stored here by another name."""

    name: str
    num_bytes: int
    digest: str
    path: str = ""


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit. license: as the hub names it, "" if it names none."""

    repository: str
    revision: str
    commit: str
    license: str
    files: tuple[RemoteFile, ...]

    def file(self, name: str) -> RemoteFile | None:
        return next((file for file in self.files if file.name == name), None)


def list_repository(repository: str, revision: str, *, file: str = "", label: str = "") -> Listing:
    """Ask the hub for the files of `repository` at `revision`. file, label: of the only one that is wanted. Raises
    ModelError, TriforceError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    with translated_errors(repository, revision, file=file, label=label):
        try:
            with waiting():
                info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=ANSWER_SECONDS)
        except HfHubHTTPError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise TriforceError(f"the hub's answer cannot be read ({error}); is HF_ENDPOINT a hub?") from error
    commit, name = str(info.sha), str(info.id)
    if not is_id(name) or not _COMMIT.fullmatch(commit):
        raise ModelError(f"the hub answers with {name!r} at {commit!r} for {repository}; is HF_ENDPOINT a hub?")
    if name.lower() != repository.lower():  # renamed on the hub; store it under the requested name
        name = repository
    return Listing(name, revision, commit, _license(info), tuple(map(_file, info.siblings or ())))


def file_url(listing: Listing, file: RemoteFile) -> str:
    """The URL of `file` at the listing's commit, so that a later push changes nothing."""
    from huggingface_hub import HfApi

    return f"{HfApi().endpoint}/{listing.repository}/resolve/{listing.commit}/{quote(file.path or file.name)}"


@contextmanager
def translated_errors(
    repository: str, revision: str, folder: Path | None = None, *, file: str = "", label: str = ""
) -> Iterator[None]:
    """Raise errors of huggingface_hub, the network and the disk of `folder` as TriforceErrors that name the command to
    run. file, label: of the only one that is pulled."""
    from huggingface_hub import errors

    again = pull_command(repository, revision, file=file, label=label)
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
        raise ModelError(
            f"{repository} has no revision {revision!r}; {pull_command(repository, file=file, label=label)} takes main"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no repository {repository}: check the spelling; if it is private, log in with "
            f"'hf auth login' and run {again}"
        ) from error
    except errors.HfHubHTTPError as error:
        _raise_for_status(repository, error.response.status_code, again, error)
    except transport_error() as error:
        kind = type(error).__name__
        problem = f"the hub cannot be reached ({error})" if "Connect" in kind else f"the connection broke off ({kind})"
        raise TriforceError(f"{problem}; check the network, then {again} resumes it") from error
    except OSError as error:
        raise disk_error(error, folder or models_folder(), f"{again} resumes it") from error


def transport_error() -> type[Exception]:
    """The base class of all errors of the HTTP library that huggingface_hub uses, requests or httpx."""
    from huggingface_hub.errors import HfHubHTTPError

    root: type[Exception] = HfHubHTTPError.__bases__[0]
    return root


def _raise_for_status(repository: str, status: int, again: str, error: Exception) -> NoReturn:
    if status in (401, 403):
        raise ModelError(
            f"the hub refuses access to {repository} (status {status}): log in with 'hf auth login' as a user who may "
            f"read it, then run {again}"
        ) from error
    if status == 404:
        raise ModelError(f"a file of {repository} was removed from the hub; run {again} to list it again") from error
    raise TriforceError(f"the hub answered with status {status}; try later, {again} resumes it") from error


def _license(info: ModelInfo) -> str:
    found = (_LICENSE.fullmatch(tag) for tag in info.tags or ())
    return next((match[1] for match in found if match), "")


def _file(sibling: RepoSibling) -> RemoteFile:
    digest = str(sibling.lfs.sha256 if sibling.lfs else sibling.blob_id)
    if type(sibling.size) is not int or sibling.size < 0 or not _DIGEST.fullmatch(digest):
        raise ModelError(f"the hub lists no length and hash of {sibling.rfilename!r}; try later")
    return RemoteFile(sibling.rfilename, sibling.size, digest)
