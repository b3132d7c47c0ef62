"""The small files of Iceberg tables, read and written through changelog/storage.py.

So the metadata of a table have the same address, credentials and time limits as its data, which executors write.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream

from subscriber.changelog.storage import Location, file_size, location, make_directory, write_file

FILE = "file://"


def location_of(path: Location) -> str:
    """Return the location that Iceberg has for a path: a URL whose path is not escaped."""
    return f"{FILE}{path.absolute()}" if isinstance(path, Path) else str(path)


def path_of(text: str) -> Location:
    """Return the path of a location. Those of local files may have no scheme, or one slash, as Hadoop writes them."""
    return location(re.sub(r"^file:/+", "/", text))


class LakeFileIO(FileIO):
    """Reads and writes whole files. PyIceberg creates it by its name, as property `py-io-impl` of a catalog."""

    def new_input(self, location: str) -> InputFile:
        return _Input(location)

    def new_output(self, location: str) -> OutputFile:
        return _Output(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        path_of(location if isinstance(location, str) else location.location).unlink()


class _Input(InputFile):
    def __len__(self) -> int:
        return file_size(path_of(self.location))

    def exists(self) -> bool:
        return path_of(self.location).exists()

    def open(self, seekable: bool = True) -> InputStream:
        return io.BytesIO(path_of(self.location).read_bytes())


class _Output(OutputFile):
    def __len__(self) -> int:
        return file_size(path_of(self.location))

    def exists(self) -> bool:
        return path_of(self.location).exists()

    def to_input_file(self) -> InputFile:
        return _Input(self.location)

    def create(self, overwrite: bool = False) -> OutputStream:
        if not overwrite and self.exists():
            raise FileExistsError(self.location)
        return _Buffer(path_of(self.location))


class _Buffer(io.BytesIO):
    """A file that appears whole at close(). Nothing refers to a file whose writer has failed."""

    def __init__(self, path: Location) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            if isinstance(self._path, Path):
                make_directory(self._path.parent)
            write_file(self._path, self.getvalue())
        super().close()
