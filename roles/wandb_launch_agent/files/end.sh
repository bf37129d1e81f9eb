#!/bin/sh
# end.sh <PROGRAM: ends what Nomad has started with this word, and what that has started; prints their allocations. It asks
# nobody to end, for a run that is sent to Nomad would be stopped there first, for which its servers would be waited for.
read -r program
allocation_of() {
    tr '\0' '\n' <"$1/environ" | sed -n 's/^NOMAD_ALLOC_ID=//p'
}
words_of() {
    tr '\0' '\n' <"$1/cmdline"
}
exec 2>/dev/null
allocations=$(for process in /proc/[0-9]*; do
    ! words_of "$process" | grep -qxF -e "$program" || allocation_of "$process"
done | sort -u)
[ -n "$allocations" ] || exit 0
echo "$allocations"
# What is started meanwhile is ended the next time.
for _ in 1 2 3 4 5 6 7 8 9 10; do
    left=
    for process in /proc/[0-9]*; do
        allocation=$(allocation_of "$process")
        if [ -n "$allocation" ] && echo "$allocations" | grep -qxF -e "$allocation"; then
            left=yes
            kill -KILL "${process#/proc/}"
        fi
    done
    [ -n "$left" ] || exit 0
    sleep 0.5
done
