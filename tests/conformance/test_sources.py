"""Fetching transformers' tests, from a repository that stands in for the real one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import sources
import transformers


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """Make a repository that is tagged as the installed version; the cache is empty."""
    made = tmp_path / "repository"
    for name in ("tests/generation/test_utils.py", "utils/test_module/code.py", "src/model.py", "docs/page.md"):
        (made / name).parent.mkdir(parents=True)
        (made / name).touch()
    who = ("-c", "user.name=A tester", "-c", "user.email=tester@example.org")
    for command in (
        ("init", "-q"),
        ("add", "."),
        (*who, "commit", "-qm", "All"),
        ("tag", f"v{transformers.__version__}"),
    ):
        subprocess.run(("git", "-C", made, *command), check=True)
    monkeypatch.setattr(sources, "REPOSITORY", made.as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRANSFORMERS_CHECKOUT", raising=False)
    return made


def test_fetched_once(repository):
    """The fetch brings what the tests need and nothing else; then the repository is no longer needed."""
    assert "`make test-conformance` fetches them" in sources.missing()
    sources.fetch()
    assert sources.missing() is None
    place = sources.checkout()
    assert (place / "utils" / "test_module" / "code.py").is_file() and (place / "src").is_dir()
    assert not (place / "docs").exists()
    repository.rename(repository.with_name("gone"))
    sources.fetch()


def test_out_of_reach(repository):
    """A failed fetch leaves nothing that would be taken for the tests."""
    repository.rename(repository.with_name("gone"))
    with pytest.raises(subprocess.SubprocessError):
        sources.fetch()
    assert sources.missing() and not list(sources.checkout().parent.iterdir())


def test_checkout_of_the_users(repository, monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_CHECKOUT", str(repository))
    assert sources.checkout() == repository and sources.missing() is None
