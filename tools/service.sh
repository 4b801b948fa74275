# shellcheck shell=bash
# Installs moe-gpu-stabilizer as a service, or upgrades it: read by install.sh, which has $here, $python and the package
# lists. tools/uninstall, read before, says what belongs where.
#
# The new version is made ready beside the old one, and tried, before anything that works is touched. If it does not start
# then, all is put back.

made_for=("debian 12" "debian 13" "ubuntu 22.04" "ubuntu 24.04")
oldest_python=3.10

release='' # the new version's directory, until it is in use
start=''   # is the service to be started?
earlier='' # the version that was in use
fate=''    # of the settings: see fate_of_settings
switched='' # has anything outside of $home been touched?

# usage: install_service [OPTION...]
install_service() {
    local option
    start=yes
    for option in "$@"; do
        case $option in
        --no-start) start='' ;;
        --dry-run) dry_run=yes ;;
        *) usage_error "what is '$option'?" ;;
        esac
    done
    require_debian
    [ -n "$dry_run" ] || require_root "$@"
    [ -z "$start" ] || systemd_runs || die "systemd is not running here, so a service cannot be started" \
        "for an image, to be started at its next boot: ./install.sh --no-start"
    say_if_unknown
    require_room
    if [ -n "$dry_run" ]; then
        say_plan
        return
    fi
    take_lock
    earlier=$(readlink "$home/venv" || true)
    [ -d "$earlier" ] || earlier=''
    trap undo_what_failed EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    install_packages "${run_packages[@]}"
    require_python
    prepare_release
    switch_to_release
    [ -z "$start" ] || start_service
    trap - EXIT INT TERM HUP
    remove_old_releases
    say_what_next
}

# What is there and was not put there by us is somebody's own.
require_room() {
    if [ "$here" = "$home" ] || [ -L "$home" ] || { [ ! -e "$mark" ] && [ -n "$(ls -A "$home" 2>/dev/null)" ]; }; then
        die "$home is there, and not made by this program; nothing was changed" "move it away: the program goes there"
    fi
    ! exists "$command_link" || [ "$(readlink "$command_link")" = "$program" ] ||
        die "$command_link is there, and is not ours" "move it away, if it is of no use any more"
    [ ! -f "/etc/systemd/system/$name.service" ] ||
        say "note: /etc/systemd/system/$name.service is yours, and is used instead of the unit that comes with this"
}

say_if_unknown() {
    local id
    # shellcheck source=/dev/null
    id=$(. /etc/os-release && printf '%s %s' "$ID" "${VERSION_ID:-}")
    [[ " ${made_for[*]} " == *" $id "* ]] || say "note: this is made for ${made_for[*]}; whether it works on $id is not known"
}

require_python() {
    "$python" -c "import sys; sys.exit(sys.version_info < (${oldest_python/./, }))" ||
        die "$("$python" --version) is too old" "Python $oldest_python or newer is needed: Debian 12, Ubuntu 22.04"
}

say_plan() {
    local package missing=()
    for package in "${run_packages[@]}"; do
        is_installed_package "$package" || missing+=("$package")
    done
    say "would install Debian packages: ${missing[*]:-none, all are there}"
    say "would install $(new_version) in $home/venv, with packages from PyPI"
    say "would write $command_link, $unit, $man_page, $completion"
    case $(fate_of_settings) in
    new) say "would write $settings" ;;
    replace) say "would replace $settings, which was never edited" ;;
    keep) say "would keep $settings" ;;
    beside) say "would keep $settings, which was edited, and put the new one beside it as $settings.new" ;;
    esac
    say "would enable the service${start:+ and start it}"
}

new_version() { sed -n "s/^__version__ = \"\(.*\)\"/$name \1/p" "$here/moe_gpu_stabilizer/__init__.py"; }

# The program in a venv of its own, with all that belongs to it beside it.
prepare_release() {
    local source
    say "installing $(new_version) in $home"
    mkdir -p "$home"
    touch "$mark"
    release=$(mktemp -d "$home/venv-XXXXXX")
    chmod 755 "$release"
    "$python" -m venv --system-site-packages "$release" || die "cannot make a venv in $home; nothing was changed" "is the disk full?"
    # pip builds in the source folder: a copy leaves the clone as it is.
    source=$release/source
    mkdir "$source"
    cp -R "$here/moe_gpu_stabilizer" "$here/pyproject.toml" "$here/README.md" "$source"
    "$release/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --ignore-installed "$source" </dev/null ||
        die "pip could not install what pyproject.toml names; nothing was changed" "is the network there? is the disk full?"
    rm -rf "$source"
    mkdir "$release/files"
    cp "$here/systemd/$name.service" "$here/etc/default/$name" "$here/man/$name.8" "$here/tools/uninstall" "$release/files"
    cp "$here/completions/$name" "$release/files/completion"
    "$release/bin/$name" --version >/dev/null || die "the new version does not run; nothing was changed"
    check_settings
}

# Settings that the new version cannot read would keep it from starting.
check_settings() {
    local status=0
    ! exists "$settings" || "$release/bin/$name" --check >/dev/null || status=$?
    [ $status != 2 ] || die "the new version cannot use $settings, as said above; nothing was changed" \
        "correct it, and run ./install.sh again"
}

# What becomes of /etc/default: "new", "replace", "keep", or "beside".
fate_of_settings() {
    local earlier_default=$home/venv/files/$name
    if ! exists "$settings"; then
        say new
    elif cmp -s "$settings" "$here/etc/default/$name"; then
        say keep
    elif [ ! -L "$settings" ] && cmp -s "$settings" "$earlier_default"; then
        say replace
    elif cmp -s "$earlier_default" "$here/etc/default/$name"; then
        say keep # edited, and there is nothing new to see
    else
        say beside
    fi
}

switch_to_release() {
    fate=$(fate_of_settings)
    switched=yes
    use_release "$release"
    case $fate in
    new | replace) put "$release/files/$name" "$settings" ;;
    beside)
        put "$release/files/$name" "$settings.new"
        say "$settings was edited and stays as it is; the new default is $settings.new"
        ;;
    esac
    if [ -s "$mark" ] && ! systemctl --quiet is-enabled $name.service; then
        say "the service was disabled, and stays so"
        start=''
    else
        systemctl --quiet enable $name.service ||
            die "the service cannot be enabled" "if it was masked: systemctl unmask $name"
        say "enabled" >"$mark" # who disables it from here on wants it so
    fi
}

# usage: use_release DIRECTORY
use_release() {
    ln -sfn "$1" "$home/venv.new"
    mv -T "$home/venv.new" "$home/venv"
    put "$1/files/$name.service" "$unit"
    put "$1/files/$name.8" "$man_page"
    put "$1/files/completion" "$completion"
    put "$1/files/uninstall" "$home/uninstall" 755
    make_directory "$(dirname "$command_link")"
    ln -sfn "$program" "$command_link"
    ! systemd_runs || systemctl daemon-reload
    refresh_manual
}

# Replaces the file in one step.
# usage: put SOURCE TARGET [MODE]
put() {
    make_directory "$(dirname "$2")"
    install -m "${3:-644}" "$1" "$2.part"
    mv -T "$2.part" "$2"
}

# Makes a directory and those above it, and notes which were not there: an uninstall removes these.
make_directory() {
    [ ! -d "$1" ] || return 0
    make_directory "$(dirname "$1")"
    say "$1" >>"$made_directories" # first, so that it is removed even after a kill
    mkdir "$1"
}

start_service() {
    systemctl reset-failed $name.service 2>/dev/null || true # many restarts in a row are not this one's fault
    systemctl restart $name.service || {
        journalctl --unit $name --lines 5 --output cat --no-pager >&2 || true
        die "the service did not start, for the reason above"
    }
}

# At any exit but the last: what was there before works on.
undo_what_failed() {
    local status=$?
    trap '' INT TERM HUP
    set +e
    if [ -n "$earlier" ] && [ -n "$switched" ]; then
        say "putting the earlier version back" >&2
        use_release "$earlier"
        [ "$fate" != replace ] || put "$earlier/files/$name" "$settings"
        [ -z "$start" ] || systemctl reset-failed $name.service 2>/dev/null
        [ -z "$start" ] || ! systemctl restart $name.service || say "it runs again" >&2
    elif [ -n "$switched" ]; then
        say "taking it off again" >&2
        (undone=yes && uninstall) >/dev/null
    fi
    [ -z "$switched" ] || [ "$fate" != new ] || rm -f "$settings"
    [ -z "$switched" ] || [ "$fate" != beside ] || rm -f "$settings.new"
    [ -z "$release" ] || rm -rf "$release"
    # Of a first try that changed nothing.
    [ -n "$switched" ] || [ -n "$earlier" ] || [ "$(ls -A "$home" 2>/dev/null)" != "${mark##*/}" ] || rm -r "$home"
    exit $status
}

# A daemon that was not restarted still runs from its own.
remove_old_releases() {
    local directory
    ! { [ -z "$start" ] && systemd_runs && systemctl --quiet is-active $name.service; } || return 0
    for directory in "$home"/venv-*; do
        [ "$directory" = "$release" ] || rm -rf "$directory"
    done
}

say_what_next() {
    say ""
    "$program" --check || true # what is missing, it has said
    say ""
    say "$(new_version) is installed${start:+ and running}. What you may need next:"
    say "  $name --status                              what it is doing, for whom"
    say "  journalctl --unit $name --follow            what it has done"
    say "  systemctl reload $name                      after an edit of $settings"
    if [ -n "$start" ]; then
        return
    elif systemd_runs && systemctl --quiet is-active $name.service; then
        say "The version before is still running. To start this one: systemctl restart $name"
    elif systemctl --quiet is-enabled $name.service; then
        say "It was not started: it starts at the next boot, or with: systemctl start $name"
    else
        say "It was not started. To do so, now and at each boot: systemctl enable --now $name"
    fi
}
