"""Every option of a model and of a verb, declared once (``core/option_declaration.py`` says how).

A dataclass here is a group of options, such as ``Traffic``; ``verb_options.py`` says which groups a
verb takes. ``keywords.py`` is generated from both: it tells type checkers the keywords of each
verb."""
