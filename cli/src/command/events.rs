//! `get event`: past and new events.

use vmmd_api::v1;

use crate::{
    args::kind::GetEvent,
    client::{self, Client, QUICK, call, over_restarts, watch_ended},
    failure::Result,
    manifest::emit,
    output::{self, age, event, table::Table},
};

/// Prints events; with `--watch` until the user ends it.
pub async fn events(client: &Client, args: &GetEvent) -> Result<()> {
    let filter = v1::EventFilter {
        object: args.vm.as_ref().map(|vm| client::reference("Vm", vm)),
        severity: args.severity.unwrap_or_default().into(),
        reasons: Vec::new(),
    };
    let request = v1::ListEventsRequest {
        filter: Some(filter.clone()),
        page_size: args.limit,
        ..Default::default()
    };
    let listed = call(QUICK, client.events.clone().list_events(request)).await?;
    let mut printer = Printer {
        json: args.output.is_some(),
        table: Table::new(event::COLUMNS.to_vec()),
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
    over_restarts(true, async |tries: &mut u32| {
        let request = v1::WatchEventsRequest {
            filter: Some(filter.clone()),
            cursor: cursor.clone(),
        };
        let mut stream = client.events.clone().watch_events(request).await?.into_inner();
        while let Some(response) = stream.message().await? {
            *tries = 0;
            cursor = response.cursor;
            response.event.iter().try_for_each(|event| printer.one(event))?;
        }
        Err(watch_ended())
    })
    .await
    .map_err(|failure| match &*failure.reason {
        "CURSOR_EXPIRED" => failure.hint("some events were missed: run `vmmctl get event` again"),
        _ => failure,
    })
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
