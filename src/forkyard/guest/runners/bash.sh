# What a session's bash is told first. Requests are lines of bash themselves: __fy_take, which
# unpacks the code, the eval of it, and __fy_done. A line that was cut off lacks its END.
# Frames are as in python.py.
PS1= PS2= PROMPT_COMMAND=
set +H +m
unset HISTFILE MAILCHECK
exec {__fy_out}>&1 {__fy_err}>&2
declare -A __fy_ended
__fy_take() {
    [[ $3 == END ]] || return 1
    __fy_id=$1
    printf '\0%sb0000' "$1" >&"$__fy_out"
    printf '\0%sb0000' "$1" >&"$__fy_err"
    printf -v __fy_code '%b' "${2//%/\\x}"
    # Asked for again, it is told and not repeated.
    [[ -z ${__fy_ended[$1]-} ]] || __fy_code="(exit ${__fy_ended[$1]})"
}
__fy_done() {
    local code=$? said
    [[ $2 == END && $1 == "$__fy_id" ]] || return
    exec 1>&"$__fy_out" 2>&"$__fy_err"
    said="{\"code\":$code}"
    [[ -z ${__fy_ended[$1]-} ]] || said="{\"code\":$code,\"cut\":true}"
    __fy_ended[$1]=$code
    printf '\0%sf0000' "$1" >&"$__fy_err"
    printf '\0%sf%04x%s' "$1" "${#said}" "$said" >&"$__fy_out"
}
__fy_sync() {
    [[ $2 == END ]] || return
    printf '\0%ss0000' "$1" >&"$__fy_err"
    printf '\0%ss0000' "$1" >&"$__fy_out"
}
exit() { builtin exit "$@" 2>/dev/null; }
# Hands files over to whoever ran the code; they are read when it has ended.
artifact() {
    local file said
    for file; do
        [[ -f $file ]] || { echo "artifact: no such file: $file" >&2; return 1; }
        [[ $file == /* ]] || file=$PWD/$file
        printf '\0%sp%04x%s' "$__fy_id" "$(LC_ALL=C; echo ${#file})" "$file" >&"$__fy_out"
    done
}
