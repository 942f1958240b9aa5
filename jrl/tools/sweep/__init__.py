"""Trains many runs that differ in a few fields (`jrl sweep`) and compares them (`jrl compare`)."""
