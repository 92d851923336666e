# Made by `python -m honed.cli.reference --write docs`.
_honectl_jobs() {
    honectl --job-numbers 2>/dev/null
}
_honectl() {
    local word words verb= current=${COMP_WORDS[COMP_CWORD]}
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case $word in submit|check|plan|preview|trial|list|show|logs|watch|cancel|hold|release|requeue|pin|unpin|prune|pause|resume|predictions|report|sandbox|doctor) verb=$word; break ;; esac
    done
    case $verb in
        "") words="submit check plan preview trial list show logs watch cancel hold release requeue pin unpin prune pause resume predictions report sandbox doctor --root --user" ;;
        submit) words="--json --hold --stage --wait" ;;
        check) words="--json" ;;
        plan) words="--json" ;;
        preview) words="--json --rows" ;;
        trial) words="--json" ;;
        list) words="--json --state --all --limit --after $(_honectl_jobs)" ;;
        show) words="--json $(_honectl_jobs)" ;;
        logs) words="--json --follow --raw --explain $(_honectl_jobs)" ;;
        watch) words="--json $(_honectl_jobs)" ;;
        cancel) words="--json $(_honectl_jobs)" ;;
        hold) words="--json $(_honectl_jobs)" ;;
        release) words="--json $(_honectl_jobs)" ;;
        requeue) words="--json --from-start $(_honectl_jobs)" ;;
        pin) words="--json $(_honectl_jobs)" ;;
        unpin) words="--json $(_honectl_jobs)" ;;
        prune) words="--json --older-than --keep --max-size --state --checkpoints --rejected --dry-run $(_honectl_jobs)" ;;
        pause) words="" ;;
        resume) words="" ;;
        predictions) words="--json --sample --step --jsonl --csv $(_honectl_jobs)" ;;
        report) words="--json --open $(_honectl_jobs)" ;;
        sandbox) words="--dry-run" ;;
        doctor) words="--json" ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}
complete -o default -F _honectl honectl
