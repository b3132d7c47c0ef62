"""Obstacles of a move, found before anything is changed.

run_preflight() asks both servers and changes nothing. Each obstacle is a PreflightFinding with a name such as
`unlogged:public.cache`. An error stops a move until it is fixed, or until its name is waived with `--waive`.

    model.py        findings, waivers
    rules.py        rules that ask one server: a query and the finding of each row
    comparison.py   rules that compare both servers: settings, collations, extensions, roles, tablespaces
    preflight.py    all rules, those of `subscriber check` included
"""
