//! `events`: past and current events.

use std::time::Duration;

use vmmd_api::v1::{self, EventSeverity};

use crate::{
    args::observe::{Events, LineOutput, Severity},
    client::{self, Client, QUICK, call},
    failure::{Code, Failure, Result},
    manifest::emit,
    output::{self, age, event, table::Table},
};

/// How long to wait before a daemon that has gone is looked for again, at first and at most.
const AGAIN: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// Prints events; with `--watch` until somebody ends it.
pub async fn events(client: &Client, args: &Events) -> Result<()> {
    let filter = filter(args);
    let request = v1::ListEventsRequest {
        filter: Some(filter.clone()),
        page_size: args.limit,
        ..Default::default()
    };
    let listed = call(QUICK, client.events.clone().list_events(request)).await?;
    let mut printer = Printer {
        json: args.output == Some(LineOutput::Json),
        table: event::table(),
    };
    let mut shown = listed.events;
    if let Some(since) = args.since {
        let first = jiff::Timestamp::now() - since;
        shown.retain(|event| age::timestamp(event.time.as_ref()).is_none_or(|time| time >= first));
    }
    printer.all(&shown)?;
    if !args.watch {
        return Ok(());
    }
    let mut cursor = listed.cursor;
    let mut wait = AGAIN.0;
    loop {
        let before = cursor.clone();
        let lost = match follow(client, &filter, &mut cursor, &mut printer).await {
            Ok(()) => Failure::new(Code::Unavailable, "vmmd ended the watch"),
            Err(failure) if failure.code == Code::Unavailable => failure,
            Err(failure) if &*failure.reason == "CURSOR_EXPIRED" => {
                return Err(failure.hint("some events were missed: run `vmmctl events` again"));
            }
            Err(failure) => return Err(failure),
        };
        if cursor != before {
            wait = AGAIN.0;
        }
        if wait == AGAIN.0 {
            eprintln!("{lost}; going on when it is back");
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(AGAIN.1);
    }
}

fn filter(args: &Events) -> v1::EventFilter {
    let severity = match args.severity {
        None => EventSeverity::Unspecified,
        Some(Severity::Normal) => EventSeverity::Normal,
        Some(Severity::Warning) => EventSeverity::Warning,
    };
    v1::EventFilter {
        object: args.vm.as_ref().map(|vm| client::reference("Vm", vm)),
        severity: severity.into(),
        reasons: Vec::new(),
    }
}

async fn follow(
    client: &Client,
    filter: &v1::EventFilter,
    cursor: &mut String,
    printer: &mut Printer,
) -> Result<()> {
    let request = v1::WatchEventsRequest {
        filter: Some(filter.clone()),
        cursor: cursor.clone(),
    };
    let mut stream = client.events.clone().watch_events(request).await?.into_inner();
    while let Some(response) = stream.message().await? {
        if let Some(event) = &response.event {
            printer.one(event)?;
        }
        *cursor = response.cursor;
    }
    Ok(())
}

struct Printer {
    json: bool,
    table: Table,
}

impl Printer {
    fn all(&mut self, events: &[v1::Event]) -> Result<()> {
        if self.json {
            return events.iter().try_for_each(|event| self.one(event));
        }
        let rows: Vec<_> = events.iter().map(event::row).collect();
        output::print(&self.table.whole(&rows, true))
    }

    fn one(&mut self, event: &v1::Event) -> Result<()> {
        if self.json {
            return output::line(emit::json(event)?.to_string());
        }
        let row = event::row(event);
        self.table.fit(&row);
        output::line(self.table.row(&row))
    }
}
