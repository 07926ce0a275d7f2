"""MECHANISM: state by original parameter name: written by all ranks, and read so that each rank reads only its own."""

from penstock.checkpoint.background import Background
from penstock.checkpoint.directory import candidates, is_hugging_face, open_directory
from penstock.checkpoint.draft import Content, Draft
from penstock.checkpoint.listing import listing, verified
from penstock.checkpoint.manifest import Manifest, fingerprint
from penstock.checkpoint.names import ModelNames, match
from penstock.checkpoint.optimizer_state import check_optimizer, parted
from penstock.checkpoint.random_state import random_state, restorer
from penstock.checkpoint.reading import DTYPES, Loaded, Reader
from penstock.checkpoint.scheduler_state import SavedSchedulers, document_of
from penstock.checkpoint.shelf import DRAFT, is_checkpoint, is_good, is_shelf, make_root, name_of, step_of, steps, tidy
from penstock.checkpoint.stored import CONFIG, PLAN, RUN, Stored
from penstock.checkpoint.tensors_file import FileRecord, form_of
from penstock.checkpoint.values import Tensors, to_plain, to_text
from penstock.checkpoint.verifying import check_files

__all__ = [
    "CONFIG",
    "DRAFT",
    "DTYPES",
    "PLAN",
    "RUN",
    "Background",
    "Content",
    "Draft",
    "FileRecord",
    "Loaded",
    "Manifest",
    "ModelNames",
    "Reader",
    "SavedSchedulers",
    "Stored",
    "Tensors",
    "candidates",
    "check_files",
    "check_optimizer",
    "document_of",
    "fingerprint",
    "form_of",
    "is_checkpoint",
    "is_good",
    "is_hugging_face",
    "is_shelf",
    "listing",
    "make_root",
    "match",
    "name_of",
    "open_directory",
    "parted",
    "random_state",
    "restorer",
    "step_of",
    "steps",
    "tidy",
    "to_plain",
    "to_text",
    "verified",
]
