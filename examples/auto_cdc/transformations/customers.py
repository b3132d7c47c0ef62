"""The table public.customers by AUTO CDC: its rows (SCD type 1), and all versions of them (SCD type 2).

The publisher needs `ALTER TABLE customers REPLICA IDENTITY FULL`. Without it, an update has no values of large columns
that it does not change, and AUTO CDC would store NULL. A TRUNCATE fails the pipeline: AUTO CDC has no such event.
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

TABLE = "public.customers"
KEYS = ["id"]

spark = SparkSession.active()


@dp.temporary_view
def customer_events() -> DataFrame:
    """Return an event for each change, and two for an update that changes the key."""
    changes = (
        spark.readStream.format("pgcdc")
        .option("conninfo", spark.conf.get("spark.shop.publisher") or "")
        .option("publications", spark.conf.get("spark.shop.publication") or "")
        .option("tables", TABLE)
        .option("snapshot", spark.conf.get("spark.shop.snapshot") or "")
        .load(spark.conf.get("spark.shop.log"))
    )
    put = f.struct(f.lit(False).alias("is_delete"), f.col("after").alias("row"))
    delete = f.struct(f.lit(True).alias("is_delete"), f.col("before").alias("row"))
    old_key, new_key = (f.struct(*(f.col(f"{side}.{key}") for key in KEYS)) for side in ("before", "after"))
    events = (
        f.when(f.col("op") == "t", f.raise_error(f.lit(f"{TABLE} was truncated: start a new pipeline")))
        .when(f.col("op") == "d", f.array(delete))
        .when((f.col("op") == "u") & (old_key != new_key), f.array(delete, put))
        .otherwise(f.array(put))
    )
    return changes.select("_seq", f.explode(events).alias("event")).select("_seq", "event.is_delete", "event.row.*")


dp.create_streaming_table("customers")
dp.create_auto_cdc_flow(
    target="customers",
    source="customer_events",
    keys=KEYS,
    sequence_by="_seq",
    apply_as_deletes="is_delete",
    except_column_list=["_seq", "is_delete"],
    stored_as_scd_type=1,
)

dp.create_streaming_table("customer_history")
dp.create_auto_cdc_flow(
    target="customer_history",
    source="customer_events",
    keys=KEYS,
    sequence_by="_seq",
    apply_as_deletes="is_delete",
    except_column_list=["_seq", "is_delete"],
    stored_as_scd_type=2,
)
