"""Who may ask a server for what, and how much: keys, budgets, the door before every route, and the log of requests."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.serve.access.access_directory import SERVER_FILE as SERVER_FILE, Access as Access
    from phalanx.serve.access.budgets import (
        BUDGETS_FILE as BUDGETS_FILE,
        BudgetExceeded as BudgetExceeded,
        Budgets as Budgets,
        DayUsage as DayUsage,
        Reservation as Reservation,
        read_usage_by_day as read_usage_by_day,
    )
    from phalanx.serve.access.key_file import (
        KeyLimits as KeyLimits,
        KeyRecord as KeyRecord,
        KeyTerms as KeyTerms,
        ModelOrder as ModelOrder,
    )
    from phalanx.serve.access.key_guard import (
        AnswerCutError as AnswerCutError,
        KeyGuard as KeyGuard,
        model_quarantined as model_quarantined,
    )
    from phalanx.serve.access.key_store import KEYS_FILE as KEYS_FILE, Caller as Caller, KeyStore as KeyStore
    from phalanx.serve.access.listener import (
        ListenConfig as ListenConfig,
        bind_socket as bind_socket,
        make_server as make_server,
        run_announced as run_announced,
    )
    from phalanx.serve.access.refusals import (
        RequestRefused as RequestRefused,
        error_body as error_body,
        send_refusal as send_refusal,
    )
    from phalanx.serve.access.request_bounds import (
        RequestBounds as RequestBounds,
        check_nesting as check_nesting,
        parse_object as parse_object,
    )
    from phalanx.serve.access.request_log import (
        LOG_FOLDER as LOG_FOLDER,
        RequestFacts as RequestFacts,
        RequestLog as RequestLog,
        verify_request_log as verify_request_log,
    )
    from phalanx.serve.access.request_notes import (
        PromptSketch as PromptSketch,
        RequestNotes as RequestNotes,
        collect_notes as collect_notes,
        note_filter as note_filter,
        note_prompts as note_prompts,
        note_token as note_token,
        sketch_prompt as sketch_prompt,
    )
    from phalanx.serve.access.sealed_texts import (
        SEALED_KEY as SEALED_KEY,
        RequestTexts as RequestTexts,
        make_reader_key as make_reader_key,
        open_texts as open_texts,
    )


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
