"""The tables of the shop. Table `product` is replicated; it has no foreign key to other tables."""

from __future__ import annotations

from decimal import Decimal

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The tables of the shop's database."""


class Product(Base):
    """A product. The company's database has the same columns."""

    __tablename__ = "product"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    price: Mapped[Decimal]
