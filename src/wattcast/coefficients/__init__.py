"""Numbers that were fitted or chosen, each with its unit, its origin and the evidence for it.

A number that is neither physics nor published by a vendor stands in a YAML file here, one file a
subject. The code that uses it declares a class of its fields and loads the file into it once:

    class GovernorCoefficients(Coefficients):
        reaction_s: float

    GOVERNOR = load_coefficients("governor", GovernorCoefficients)

The key of a field is its name without the unit: ``reaction_s`` is ``reaction`` in the file, and its
value is written with a unit, such as ``90 ms``. An entry has this form, its value first:

    reaction:
      value: 90 ms
      origin: fitted
      evidence: >-
        The clock of an H200 falls 80 to 95 ms after a heavy load begins.
      used_by: predictor/governor.py
      noticed_by: tests/predictor/test_governor.py::test_name

``docs/coefficients.md`` is generated from these files by ``python -m
wattcast.lab.coefficient_page``.
"""

from wattcast.coefficients.coefficient_files import Coefficients, list_subjects, load_coefficients

__all__ = ["Coefficients", "list_subjects", "load_coefficients"]
