"""Numbers that were fitted or chosen, each with its unit, its origin and the evidence for it.

A number that is neither physics nor published by a vendor stands in a YAML file here, one file a
subject. The code that uses it declares a frozen dataclass and loads the file into it once:

    @dataclass(frozen=True)
    class GovernorCoefficients:
        reaction_s: float

    GOVERNOR = load_coefficients("governor", GovernorCoefficients)

The key of a field is its name without the unit: ``reaction_s`` is ``reaction`` in the file, and its
value is written with a unit, such as ``90 ms``. ``docs/coefficients.md`` is generated from these
files by ``python -m wattcast.lab.coefficient_page``.
"""

from wattcast.coefficients.coefficient_files import (
    Coefficient,
    Origin,
    list_subjects,
    load_coefficients,
    read_subject,
)

__all__ = ["Coefficient", "Origin", "list_subjects", "load_coefficients", "read_subject"]
