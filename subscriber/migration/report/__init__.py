"""The report of a move: one file that shows what was done, and that can be compared with both databases later.

    document.py     entries and their hashes, as JSON and in the page
    collect.py      the entries of a move, read from both servers
    page.py         the report as one HTML page without other resources
    agreement.py    whether a file is unchanged, and whether it agrees with the databases

Each entry has a hash over itself and the hash of the entry before it, so the last hash covers the report. The hash has
no key: keep it in another place, such as a ticket, if a user could replace the whole file.
"""
