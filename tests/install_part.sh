#!/usr/bin/env bash
# Installs one part: says WHAT in a line and runs COMMAND, whose output goes to install.log.
#   tests/install_part.sh WHAT COMMAND...
# What pip calls errors and warnings are none here: requirements that are left out on purpose, indexes that lack a
# package. So they are shown only where the command fails.
set -euo pipefail
what=$1 log=$PWD/install.log
shift
echo "Installing $what ..."
printf '\n== %s\n' "$*" >>"$log"
"$@" >>"$log" 2>&1 || {
    status=$?
    tail -n 20 "$log" >&2
    echo "Failed: $what. All that was said is in $log" >&2
    exit "$status"
}
