"""The documentation site: `make docs` writes the reference from the code and builds all pages.

    reference.py      the pages of docs/reference, and the generator of each
    commands.py       subscriber's commands and options, from the typer application
    source.py         the source text: comments, and calls
    statements.py     the SUBSCRIPTION statements and their options, from the grammar
    errors.py         the error classes, from the classes
    logs.py           events and keys of log records, from the calls that write them
    environment.py    environment variables, from the code that reads them
    settings.py       the fields of Settings, from their documentation
    catalog.py        tables and views of schema "subscriber", from SQLAlchemy's tables
    api.py            the public API, from its docstrings
    pages.py          hooks for MkDocs: pages outside of docs/, and the links to them

The pages of docs/reference are kept in the repository, so that they can be read without a build. A test fails if one of
them differs from the code. Facts that the code does not contain (the meaning of an option) are in these modules. A name
without an entry there is an error as well.
"""
