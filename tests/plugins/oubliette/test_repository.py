"""Repositories store contents by their hash: each content once, intact or reported missing, in bounded memory."""

import pytest

from pipelinerl.errors import UserError
from pipelinerl.plugins.oubliette.repository import (
    ContentMissing,
    ContentTooLarge,
    Link,
    PersistentRepository,
    TransientRepository,
)


def test_equal_data_is_stored_once_under_a_link_that_can_be_written_as_text(tmp_path):
    data = [b"", b"1 2 3\n", bytes(range(256)) * 50]
    links = [str(PersistentRepository(tmp_path).put(each)) for each in (*data, *data)]
    assert links[:3] == links[3:] and all(link.startswith("oub:") and len(link) < 96 for link in links)
    again = PersistentRepository(tmp_path)
    assert [again.get(Link.parsed(link)) for link in links[:3]] == data
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3


def test_damaged_data_in_the_repository_counts_as_missing_and_can_be_stored_again(tmp_path):
    repository = PersistentRepository(tmp_path)
    link = repository.put(b"an answer")
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    for damage in (b"", b"AN ANSWER"):
        file.write_bytes(damage)
        with pytest.raises(ContentMissing, match="upload it"):
            repository.get(link)
        assert repository.put(b"an answer") == link
        assert repository.get(link) == b"an answer"
    with pytest.raises(ContentMissing, match="is not in"):
        repository.get(Link.of(b"never"))


def test_compiled_program_is_cached_by_key_until_its_stored_data_is_deleted(tmp_path):
    repository = PersistentRepository(tmp_path)
    assert repository.compiled("key") is None
    link = repository.keep_compiled("key", b"program")
    assert PersistentRepository(tmp_path).compiled("key") == link
    for path in (tmp_path / "content").rglob("*"):
        if path.is_file():
            path.unlink()
    assert repository.compiled("key") is None


def test_error_for_an_unusable_repository_folder_names_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"the repository must be a writable folder, .*file/in"):
        PersistentRepository(tmp_path / "file" / "in")


def test_repository_in_memory_over_its_size_limit_evicts_the_least_recently_used_data():
    repository = TransientRepository(10)
    first, second = repository.put(b"aaaa"), repository.put(b"bbbb")
    assert repository.get(first) == b"aaaa"
    third = repository.put(b"cccc")
    assert (first in repository, second in repository, third in repository) == (True, False, True)
    assert repository.num_bytes == 8
    with pytest.raises(ContentMissing, match="is no longer stored"):
        repository.get(second)
    large = repository.put(b"x" * 11)
    assert repository.get(large) == b"x" * 11, "what has just come is there, however large"
    assert repository.num_bytes == 11


async def in_parts(*parts):
    for part in parts:
        yield part


async def test_data_that_arrives_in_parts_is_stored_completely_or_not_at_all(tmp_path):
    repository = PersistentRepository(tmp_path)
    link = await repository.put_parts(in_parts(b"ab", b"", b"c"), most_bytes=3)
    assert link == Link.of(b"abc") and repository.get(link) == b"abc"
    assert await repository.put_parts(in_parts(b"abc"), most_bytes=3) == link, "again"
    with pytest.raises(ContentTooLarge, match="at most 3 bytes"):
        await repository.put_parts(in_parts(b"ab", b"cd"), most_bytes=3)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [link.digest], "no draft is left"
