"""Conformance cases: whether an accelerator computes the right numbers.

A plugin adds cases through the hook ``portable_conformance_cases``; the suite that runs them is built on pytest.
"""
