import java.io.*;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.analysis.*;
import org.apache.spark.sql.connector.catalog.*;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.*;
import org.apache.spark.sql.connector.write.*;
import org.apache.spark.sql.types.*;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * A catalog whose tables support MERGE. For tests of pipelines on one machine: a table is a list of rows in the memory
 * of the driver, which is stored in the directory of the option "path" after each commit.
 */
public class MergeCatalog implements TableCatalog, SupportsNamespaces {
    static final Map<String, MergeTable> TABLES = new ConcurrentHashMap<>();
    static Path directory;
    private String name;

    public void initialize(String name, CaseInsensitiveStringMap options) {
        this.name = name;
        directory = Paths.get(options.get("path"));
        try (DirectoryStream<Path> files = Files.newDirectoryStream(directory, "*.table")) {
            for (Path file : files) MergeTable.load(file);
        } catch (IOException | ClassNotFoundException error) {
            throw new RuntimeException(error);
        }
    }
    public String name() { return name; }
    public Identifier[] listTables(String[] namespace) {
        return TABLES.values().stream().map(t -> t.ident).filter(i -> Arrays.equals(i.namespace(), namespace)).toArray(Identifier[]::new);
    }
    public Table loadTable(Identifier ident) throws NoSuchTableException {
        MergeTable found = TABLES.get(ident.toString());
        if (found == null) throw new NoSuchTableException(ident);
        return found;
    }
    public Table createTable(Identifier ident, TableInfo info) {
        MergeTable made = new MergeTable(ident, info.columns(), new HashMap<>(info.properties()));
        TABLES.put(ident.toString(), made);
        made.save();
        return made;
    }
    public Table alterTable(Identifier ident, TableChange... changes) throws NoSuchTableException {
        MergeTable table = (MergeTable) loadTable(ident);
        for (TableChange change : changes) {
            if (change instanceof TableChange.SetProperty p) table.properties.put(p.property(), p.value());
            else if (change instanceof TableChange.RemoveProperty p) table.properties.remove(p.property());
            else throw new UnsupportedOperationException(change.toString());
        }
        table.save();
        return table;
    }
    public boolean dropTable(Identifier ident) { return TABLES.remove(ident.toString()) != null; }
    public void renameTable(Identifier from, Identifier to) { throw new UnsupportedOperationException(); }
    public String[][] listNamespaces() { return new String[0][]; }
    public String[][] listNamespaces(String[] namespace) { return new String[0][]; }
    public Map<String, String> loadNamespaceMetadata(String[] namespace) { return new HashMap<>(); } // all exist
    public void createNamespace(String[] namespace, Map<String, String> metadata) { }
    public void alterNamespace(String[] namespace, NamespaceChange... changes) { }
    public boolean dropNamespace(String[] namespace, boolean cascade) { return false; }

    static class MergeTable implements SupportsRead, SupportsWrite, SupportsRowLevelOperations {
        final Identifier ident;
        final Column[] columns;
        final Map<String, String> properties;
        volatile List<InternalRow> rows = List.of();

        MergeTable(Identifier ident, Column[] columns, Map<String, String> properties) {
            this.ident = ident; this.columns = columns; this.properties = properties;
        }
        void save() {
            try (ObjectOutputStream out = new ObjectOutputStream(Files.newOutputStream(directory.resolve(ident + ".table")))) {
                out.writeObject(ident.namespace());
                out.writeObject(ident.name());
                out.writeObject(CatalogV2Util.v2ColumnsToStructType(columns).json());
                out.writeObject(new HashMap<>(properties));
                out.writeObject(new ArrayList<>(rows));
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
        @SuppressWarnings("unchecked")
        static void load(Path file) throws IOException, ClassNotFoundException {
            try (ObjectInputStream in = new ObjectInputStream(Files.newInputStream(file))) {
                Identifier ident = Identifier.of((String[]) in.readObject(), (String) in.readObject());
                StructType schema = (StructType) DataType.fromJson((String) in.readObject());
                Map<String, String> properties = (Map<String, String>) in.readObject();
                MergeTable table = new MergeTable(ident, CatalogV2Util.structTypeToV2Columns(schema, false), properties);
                table.rows = (List<InternalRow>) in.readObject();
                TABLES.put(ident.toString(), table);
            }
        }
        public String name() { return ident.toString(); }
        public Column[] columns() { return columns; }
        public Map<String, String> properties() { return properties; }
        public Set<TableCapability> capabilities() {
            return EnumSet.of(TableCapability.BATCH_READ, TableCapability.BATCH_WRITE, TableCapability.TRUNCATE);
        }
        public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) { return () -> new RowScan(this); }
        public WriteBuilder newWriteBuilder(LogicalWriteInfo info) { return new RowWrite(this, false); }
        public RowLevelOperationBuilder newRowLevelOperationBuilder(RowLevelOperationInfo info) {
            return () -> new RowLevelOperation() {
                public Command command() { return info.command(); }
                public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) { return () -> new RowScan(MergeTable.this); }
                public WriteBuilder newWriteBuilder(LogicalWriteInfo write) { return new RowWrite(MergeTable.this, true); }
            };
        }
    }

    static class RowScan implements Scan, Batch {
        private final MergeTable table;
        RowScan(MergeTable table) { this.table = table; }
        public StructType readSchema() { return CatalogV2Util.v2ColumnsToStructType(table.columns); }
        public Batch toBatch() { return this; }
        public InputPartition[] planInputPartitions() { return new InputPartition[] {new Whole()}; }
        public PartitionReaderFactory createReaderFactory() { return new Factory(table.name()); }
    }
    static class Whole implements InputPartition { }
    static class Factory implements PartitionReaderFactory {
        private final String name;
        Factory(String name) { this.name = name; }
        public PartitionReader<InternalRow> createReader(InputPartition partition) {
            Iterator<InternalRow> rows = TABLES.get(name).rows.iterator();
            return new PartitionReader<>() {
                private InternalRow row;
                public boolean next() { boolean more = rows.hasNext(); row = more ? rows.next() : null; return more; }
                public InternalRow get() { return row; }
                public void close() { }
            };
        }
    }

    static class RowWrite implements WriteBuilder, Write, BatchWrite, SupportsTruncate {
        private final MergeTable table;
        private boolean replace;
        RowWrite(MergeTable table, boolean replace) { this.table = table; this.replace = replace; }
        public WriteBuilder truncate() { replace = true; return this; }
        public Write build() { return this; }
        public BatchWrite toBatch() { return this; }
        public DataWriterFactory createBatchWriterFactory(PhysicalWriteInfo info) { return new Writers(); }
        public void commit(WriterCommitMessage[] messages) {
            List<InternalRow> all = replace ? new ArrayList<>() : new ArrayList<>(table.rows);
            for (WriterCommitMessage message : messages) all.addAll(((Rows) message).rows);
            table.rows = all;
            table.save();
        }
        public void abort(WriterCommitMessage[] messages) { }
    }
    static class Rows implements WriterCommitMessage { final ArrayList<InternalRow> rows = new ArrayList<>(); }
    static class Writers implements DataWriterFactory {
        public DataWriter<InternalRow> createWriter(int partition, long task) {
            Rows written = new Rows();
            return new DataWriter<>() {
                public void write(InternalRow row) { written.rows.add(row.copy()); }
                public WriterCommitMessage commit() { return written; }
                public void abort() { }
                public void close() { }
            };
        }
    }
}
