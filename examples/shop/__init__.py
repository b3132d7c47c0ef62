"""A shop on FastAPI and SQLAlchemy. Its products are replicated from the company's database into the shop's own."""
