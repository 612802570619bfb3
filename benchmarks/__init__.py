"""Ratios and figures measured in one run; not tests."""

from bioptimus.runtime.loader import prepare_environment

# Before anything imports torch, as the command does.
prepare_environment()
