"""The console: what a person sees of the subscriptions of a target, in a browser.

    observer.py       takes snapshots of the target, and keeps the last hour
    facts.py          reads what only the page of one subscription shows
    documents.py      the JSON documents of all pages; table_page.py: the tables of one subscription. No I/O
    routes.py         serves the documents, streams of documents, and the files of static/
    access.py         tokens and sessions of the persons who may act
    action.py         an action that a person requests
    action_runner.py  runs it, and records it in the audit
    action_routes.py  receives it over HTTP

The page is three modules of JavaScript and a style sheet, without a build step. It loads nothing from other servers. It
inserts all text as text, so a name of a table or an error from the publisher cannot become a part of the page.

Only the documents decide what a number means. The page formats it.
"""
