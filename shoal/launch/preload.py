"""Imported by the servers of ranks: what each rank would read and build again after its fork, 60 ms of its CPU time."""

from shoal.spec.catalog.models import model_names
from shoal.spec.config import build_config

model_names()  # reads the table of models
build_config({})  # builds the validators of all sections, which classes leave to their first use
