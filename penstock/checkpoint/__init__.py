"""MECHANISM: state by original parameter name: written by all ranks, and read so that each rank reads only its own."""

from penstock.checkpoint.background import Background
from penstock.checkpoint.directory import candidates, is_hugging_face, open_directory
from penstock.checkpoint.draft import Content, Draft
from penstock.checkpoint.manifest import Manifest, fingerprint
from penstock.checkpoint.names import ModelNames, match
from penstock.checkpoint.reading import Loaded, Reader
from penstock.checkpoint.stored import Stored
from penstock.checkpoint.tensors_file import FileRecord

__all__ = [
    "Background",
    "Content",
    "Draft",
    "FileRecord",
    "Loaded",
    "Manifest",
    "ModelNames",
    "Reader",
    "Stored",
    "candidates",
    "fingerprint",
    "is_hugging_face",
    "match",
    "open_directory",
]
