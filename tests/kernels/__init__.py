"""Tests of the scoring and quantizing calls, and the contract that every backend answers."""
