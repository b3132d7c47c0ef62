"""The documentation as a site: `make docs` writes the reference from the code and builds all pages.

    reference.py      which pages of docs/reference there are, and who makes each
    commands.py       subscriber's commands and options, from the typer application
    source.py         the source as it is written: comments, and calls that are made somewhere
    statements.py     the SUBSCRIPTION statements and their options, from the grammar
    errors.py         the classes of errors, from the classes
    logs.py           events and keys of log records, from where they are written
    environment.py    variables of the environment, from where they are read
    catalog.py        tables and views of schema "subscriber", from SQLAlchemy's tables
    api.py            the public API, from its docstrings
    pages.py          what MkDocs calls: pages that live outside of docs/, and the links to them

The pages of docs/reference are kept beside the others so that they can be read without a build, and a test fails when one
of them is not what the code says. What no code can tell (what an option means) is said in these modules, and a name
that has no entry there is an error as well.
"""
