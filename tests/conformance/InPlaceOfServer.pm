# PostgreSQL's own tests of subscriptions, with `subscriber` doing what the server would.
#
#     SUBSCRIBER=.venv/bin/subscriber perl -I tests/conformance -MInPlaceOfServer t/001_rep_changes.pl
#
# The tests know nothing of it. What they do to a server they do by methods of PostgreSQL::Test::Cluster, and four of
# these are replaced here:
#
#   psql              CREATE, ALTER and DROP SUBSCRIPTION are cut out of a script and given to `subscriber exec`; the
#                     rest of the script goes to psql as before, the roles it has set included
#   poll_query_until  sees our views
#   teardown_node,    end the launchers of that server. There is one for each database from its first
#   clean_node        CREATE SUBSCRIPTION on, and it logs into the server's own log, which tests read
#
# "Sees our views" is a search_path with schema subscriber before pg_catalog, for scripts that name one of them.
package InPlaceOfServer;

use strict;
use warnings FATAL => 'all';

use IPC::Run ();
use PostgreSQL::Test::Cluster;

my @command = split ' ', $ENV{SUBSCRIBER} // 'subscriber';
my %launchers;    # "server database" => IPC::Run's handle
my %before = map { $_ => PostgreSQL::Test::Cluster->can($_) } qw(psql poll_query_until teardown_node clean_node);

my $is_ours = qr/\A\s*(?:CREATE|ALTER|DROP)\s+SUBSCRIPTION\b/i;
my $is_role = qr/\A\s*(?:SET|RESET)\s+(SESSION\s+AUTHORIZATION|ROLE)\b\s*(.*?)\s*\z/is;

# The statements of a script, comments left out, without their semicolons.
sub statements
{
	my ($script) = @_;
	my @found = ('');
	while ($script =~ /\G(?:
		(?<quoted> E'(?:[^'\\]|''|\\.)*' | '(?:[^']|'')*' | "(?:[^"]|"")*" | (?<tag>\$\w*\$).*?\g{tag} )
		| (?<comment> --[^\n]* | \/\*.*?\*\/ )
		| (?<end> ; )
		| (?<other> . ) )/gcsxi)
	{
		if (defined $+{end}) { push @found, ''; }
		elsif (!defined $+{comment}) { $found[-1] .= $+{quoted} // $+{other}; }
	}
	return grep { /\S/ } @found;
}

# PGOPTIONS for a script: with our views before the server's if it names one.
sub options_for
{
	my ($script) = @_;
	my $given = $ENV{PGOPTIONS} // '';
	return $given unless $script =~ /\bpg_(?:stat_)?(?:reset_)?subscription/i;
	return "$given -c search_path=public,subscriber,pg_catalog";
}

# A script may say pg_catalog where it means the view that anybody would find.
sub unqualified
{
	my ($script) = @_;
	return $script =~ s/\bpg_catalog\.(?=pg_(?:stat_)?subscription)//gir;
}

sub start_launcher
{
	my ($node, $database) = @_;
	return if $launchers{ $node->name . " $database" };
	local %ENV = $node->_get_env();
	$launchers{ $node->name . " $database" } = IPC::Run::start(
		[ @command, 'run', '--target' => $node->connstr($database), '--log-format' => 'postgres' ],
		'<' => \undef, '>>' => $node->logfile, '2>>' => $node->logfile);
	return;
}

sub stop_launchers
{
	my ($name) = @_;
	foreach my $key (grep { !defined $name || (split ' ')[0] eq $name } keys %launchers)
	{
		my $launcher = delete $launchers{$key};
		eval { $launcher->kill_kill(grace => 10); };    # SIGTERM first
	}
	return;
}

# One of our statements: (exit status as psql's, what it wrote to stderr).
sub execute
{
	my ($node, $database, $statement, $connstr, $roles, %params) = @_;
	start_launcher($node, $database) if $statement =~ /\A\s*CREATE/i;
	$connstr .= " user=$roles->{session}" if defined $roles->{session};    # which options cannot set
	$connstr .= " options='-c role=$roles->{role}'" if defined $roles->{role};
	my @extra = @{ $params{extra_params} // [] };
	while (@extra)
	{
		my $option = shift @extra;
		$connstr .= ' user=' . shift @extra if $option =~ /\A(?:-U|--username)\z/;
	}
	local %ENV = $node->_get_env();
	my ($out, $err) = ('', '');
	IPC::Run::run([ @command, 'exec', '--target' => $connstr, $statement ], '<' => \undef, '>' => \$out, '2>' => \$err);
	chomp $err;
	return ($? >> 8, $err);
}

# The script cut into pieces: [0, script for psql] or [1, a statement of ours, the roles set by then].
sub pieces
{
	my ($script) = @_;
	my (@pieces, %roles);
	my $preamble = '';
	foreach my $statement (statements($script))
	{
		if ($statement =~ $is_ours)
		{
			push @pieces, [ 1, $statement, {%roles} ];
			next;
		}
		push @pieces, [ 0, $preamble ] unless @pieces && !$pieces[-1][0];
		$pieces[-1][1] .= "$statement;\n";
		if ($statement =~ $is_role)
		{
			my ($what, $role) = ($1, $2);
			$preamble .= "$statement;\n";
			$role =~ s/\ATO\s+|["']//gi;
			$roles{ $what =~ /\Arole\z/i ? 'role' : 'session' } = length $role ? $role : undef;
		}
	}
	return @pieces;
}

sub psql
{
	my ($node, $database, $script, %params) = @_;
	my @pieces = pieces($script);
	if ($params{replication} || !grep { $_->[0] } @pieces)
	{
		local $ENV{PGOPTIONS} = options_for($script);
		return $before{psql}->($node, $database, unqualified($script), %params);
	}
	my ($status, @out, @err) = (0);
	my $connstr = $params{connstr} // $node->connstr($database);
	foreach my $piece (@pieces)
	{
		my ($ours, $text, $roles) = @$piece;
		my ($failed, $out, $err);
		if ($ours)
		{
			($failed, $err) = execute($node, $database, $text, $connstr, $roles, %params);
		}
		else
		{
			local $ENV{PGOPTIONS} = options_for($text);
			my %ask = (%params, stdout => \$out, stderr => \$err, on_error_die => 0);
			$failed = $before{psql}->($node, $database, unqualified($text), %ask);
		}
		push @out, $out if length($out // '');
		push @err, $err if length($err // '');
		$status = 3 if $failed;
		last if $failed && ($params{on_error_stop} // 1);
	}
	my ($out, $err) = (join("\n", @out), join("\n", @err));
	${ $params{stdout} } = $out if ref $params{stdout};
	${ $params{stderr} } = $err if ref $params{stderr};
	die "error running SQL: '$err'\nwhile running '$script'" if $status && $params{on_error_die};
	return wantarray ? ($status, $out, $err) : $status;
}

sub poll_query_until
{
	my ($node, $database, $query, @expected) = @_;
	local $ENV{PGOPTIONS} = options_for($query);
	return $before{poll_query_until}->($node, $database, unqualified($query), @expected);
}

sub teardown_node
{
	my ($node, @rest) = @_;
	stop_launchers($node->name);
	return $before{teardown_node}->($node, @rest);
}

sub clean_node
{
	my ($node, @rest) = @_;
	stop_launchers($node->name);
	return $before{clean_node}->($node, @rest);
}

{
	no strict 'refs';
	no warnings 'redefine';
	*{"PostgreSQL::Test::Cluster::$_"} = \&{$_} foreach keys %before;
}

# Runs before the end of PostgreSQL::Test::Cluster, which stops the servers and must not change the exit status either.
END
{
	my $status = $?;
	stop_launchers();
	$? = $status;
}

1;
