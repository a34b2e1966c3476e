# in_namespaces.pl UID GID PROGRAM…: runs a program as the daemon runs what serves a share: as root of namespaces of its own (users, processes, network, IPC,
# host name), whose only user and group are the node's UID and GID.
use strict;
use warnings;
my ($uid, $gid, @program) = @ARGV;
pipe(my $ready_read, my $ready_write) or die;
pipe(my $go_read, my $go_write) or die;
my $child = fork() // die;
if (!$child) {
    close $ready_read;
    close $go_write;
    # unshare(2) with CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC and CLONE_NEWUTS.
    syscall(272, 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000) == 0 or die "unshare: $!";
    syswrite $ready_write, 'r';
    sysread($go_read, my $word, 1) == 1 or exit 1;
    # setgroups, setresgid, setresuid.
    syscall(116, 0, 0) == 0 or die "setgroups: $!";
    syscall(119, 0, 0, 0) == 0 or die "setresgid: $!";
    syscall(117, 0, 0, 0) == 0 or die "setresuid: $!";
    # The next process is the first of the new namespace.
    my $first = fork() // die;
    if (!$first) {
        exec @program or die "$program[0]: $!";
    }
    waitpid $first, 0;
    exit $? >> 8;
}
close $ready_write;
sysread($ready_read, my $word, 1) == 1 or die 'the child has ended';
for (['uid_map', $uid], ['gid_map', $gid]) {
    open my $map, '>', "/proc/$child/$_->[0]" or die "$_->[0]: $!";
    syswrite($map, "0 $_->[1] 1\n") or die "$_->[0]: $!";
    close $map;
}
syswrite $go_write, 'g';
waitpid $child, 0;
exit $? >> 8;
