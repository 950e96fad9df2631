"""Sensitivity on a tiny random model: what is measured, that it adds up, and that it is kept."""

import json
from pathlib import Path

import pytest
import torch
from tiny import build

from quantmla.analysis import sensitivity
